"""Tells others what is cached: KV events, in the wire format that vLLM publishes.

A publisher sends `[topic, sequence number, batch]` on a PUB socket; the number is eight bytes, big-endian, counting
from zero. A batch is a msgpack array `[time, events, data-parallel rank]`, an event a map with its `type`. On a second
socket (ROUTER) it answers a start number of eight bytes with all later batches it still has, and then the number -1.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import msgspec

from caudex.cache.namespace import split_namespace
from caudex.cache.prefix_cache import PrefixCache

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag_field="type", tag="BlockStored", frozen=True):
    """Whole blocks became matchable, each the parent of the next; at a prompt's start the first one has none."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", frozen=True):
    block_hashes: list[int]
    medium: str = "GPU"


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", frozen=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def take_batch(cache: PrefixCache, rank: int | None = None) -> EventBatch | None:
    """What has changed since the last call, or None if nothing has."""
    events = [_event(raw, cache.block_size) for raw in cache.take_events()]
    return EventBatch(time.time(), events, rank) if events else None


def _event(raw: tuple[Any, ...], block_size: int) -> Event:
    match raw:
        case ("stored", hashes, parent, tokens, namespace):
            salt, adapter = split_namespace(namespace)
            every = [adapter] if adapter is not None else []
            first = [*every, salt] if salt and parent is None else every
            extra = [keys or None for keys in [first, *[every] * (len(hashes) - 1)]]
            return BlockStored(
                hashes, parent, tokens, block_size, lora_name=adapter, extra_keys=extra if any(extra) else None
            )
        case ("removed", hashes):
            return BlockRemoved(hashes)
        case _:
            return AllBlocksCleared()


class EventPublisher:
    """Publishes a cache's events from a thread of its own.

    The cache's callers never wait for a subscriber: the cache notes its changes, this thread collects them every
    `interval` seconds and sends them. Who joins late or falls behind asks the replay socket, which has the last
    `history` batches.

    Parameters
    ----------
    endpoint, replay_endpoint
        ZeroMQ addresses to bind, such as ``tcp://*:5557``. A port of 0 or ``*`` takes any free one; the attributes of
        the same name then hold the address taken.

    Raises
    ------
    OSError
        An address is taken, not this machine's, or none; the message names it.
    ImportError
        pyzmq is missing; the message says how to get it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        rank: int | None = None,
        interval: float = 0.01,
        history: int = 10_000,
    ) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ImportError("publishing KV events needs ZeroMQ: pip install 'caudex[events]'") from error
        self._cache = cache
        self._topic = topic.encode()
        self._rank = rank
        self._interval = interval
        self._history: deque[tuple[int, bytes]] = deque(maxlen=history)
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._router: Any = None
        self.replay_endpoint: str | None = None
        try:
            self._pub, self.endpoint = _bound_socket(self._context, zmq.PUB, endpoint)
            if replay_endpoint is not None:
                self._router, self.replay_endpoint = _bound_socket(self._context, zmq.ROUTER, replay_endpoint)
        except OSError:
            self._context.destroy(linger=0)
            raise
        cache.enable_events()
        self._thread = threading.Thread(target=self._run, name="caudex-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends what is left, and closes the sockets; the addresses are free when it returns.

        A ZeroMQ socket is closed by its context's thread, some time after it was told to; only the end of the context,
        which is therefore the publisher's own, waits for that.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=200)

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._router is not None and self._router.poll(self._interval * 1000):
                self._replay()
            elif self._router is None:
                self._stop.wait(self._interval)
            self._publish()
        self._publish()

    def _publish(self) -> None:
        batch = take_batch(self._cache, self._rank)
        if batch is None:
            return
        payload = self._encoder.encode(batch)
        self._history.append((self._next, payload))
        self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload))
        self._next += 1

    def _replay(self) -> None:
        assert self._router is not None
        frames = self._router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not a request: [client, empty, start]
        client, start = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._history:
            if number >= start:
                self._router.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        self._router.send_multipart((client, b"", END_OF_REPLAY, b""))


def _bound_socket(context: Any, kind: int, endpoint: str) -> tuple[Any, str]:
    """A socket that listens, and the address it took."""
    import zmq

    socket = context.socket(kind)
    try:
        socket.bind(endpoint[:-1] + "*" if endpoint.endswith(":0") else endpoint)
    except zmq.ZMQError as error:
        reason = str(error.strerror).partition(" (addr=")[0]
        raise OSError(f"cannot publish KV events on {endpoint}: {reason}; choose another address") from error
    return socket, str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
