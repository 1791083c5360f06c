"""KV events from real caches, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.asyncio

from caudex.bench.local import free_port
from caudex.cache import PrefixCache
from caudex.cache.events import EventPublisher
from caudex.gateway import kv_subscriber
from caudex.gateway.kv_subscriber import KvSubscriber
from caudex.gateway.token_prompt import TokenPrompts
from caudex.gateway.upstream_pool import UpstreamPool, parse_endpoint
from caudex.gateway.worker import Worker
from caudex.routing import Fleet, text_request, token_request
from caudex.routing.event_index import EventIndex
from caudex.routing.kv_events import decode_batch
from caudex.trace.bodies import parse_object
from caudex.trace.request import Request

from .conftest import PATIENCE, RunningGateway, SmallWorker, chat_body, eventually

BLOCK = 16


def store(cache: PrefixCache, tokens: list[int]) -> None:
    sequence = cache.begin(tokens)
    sequence.allocate(len(tokens))
    sequence.commit(len(tokens))
    sequence.release()


def believed(index: EventIndex, fleet: Fleet, tokens: list[int]) -> int:
    request = token_request(np.array([*tokens, 0], dtype=np.int32), block_size=BLOCK)
    return int(index.cached_tokens(request, fleet)[0])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def with_subscriber(
    publisher: EventPublisher, test: Callable[[EventIndex, Fleet], Awaitable[None]], *, replay: bool = True
) -> None:
    async def run() -> None:
        fleet, index = Fleet(), EventIndex()
        fleet.join("http://w:1")
        worker = Worker(0, UpstreamPool(parse_endpoint("http://w:1"), 1.0))
        address = publisher.endpoint.replace("0.0.0.0", "127.0.0.1")
        replay_address = (publisher.replay_endpoint or "").replace("0.0.0.0", "127.0.0.1")
        subscriber = KvSubscriber(worker, index, address, replay_address if replay else None)
        try:
            await test(index, fleet)
        finally:
            subscriber.close()

    asyncio.run(run())


def test_what_was_stored_before_and_after_joining_is_known_and_what_was_evicted_is_not() -> None:
    cache = PrefixCache(8, BLOCK)
    early, late, last = list(range(64)), list(range(1_000, 1_064)), list(range(2_000, 2_064))
    with EventPublisher(cache, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:
        store(cache, early)

        async def test(index: EventIndex, fleet: Fleet) -> None:
            await until(lambda: believed(index, fleet, early) == 64)
            store(cache, late)
            await until(lambda: believed(index, fleet, late) == 64)
            store(cache, last)
            await until(lambda: believed(index, fleet, last) == 64)
            assert believed(index, fleet, early) == cache.match([*early, 0]).num_tokens == 0
            assert index.num_blocks(0) == cache.num_cached_blocks
            cache.clear()
            await until(lambda: index.num_blocks(0) == 0)

        with_subscriber(publisher, test)


class LossyLine:
    """Carries batches from a publisher to one subscriber, and loses them while `losing`; `truth` has heard them all."""

    def __init__(self, publisher: EventPublisher) -> None:
        context = zmq.asyncio.Context.instance()
        self._sub, self._pub = context.socket(zmq.SUB), context.socket(zmq.XPUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(publisher.endpoint)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.truth = EventIndex()
        self.losing = False
        self._task = asyncio.create_task(self._carry())

    async def connected(self, cache: PrefixCache) -> None:
        """Waits for the subscription to arrive at this end, and for our own at the publisher's."""
        await self._pub.recv()
        while self.truth.block_size is None:
            cache.clear()
            store(cache, list(range(9_000, 9_016)))
            await asyncio.sleep(0.02)

    async def _carry(self) -> None:
        while True:
            frames = await self._sub.recv_multipart()
            if not self.losing:
                await self._pub.send_multipart(frames)
            for event in decode_batch(frames[2]):
                self.truth.apply(0, event)

    def close(self) -> None:
        self._task.cancel()
        self._sub.close(linger=0)
        self._pub.close(linger=0)


@asynccontextmanager
async def following(
    publisher: EventPublisher, cache: PrefixCache, *, replay: bool = True
) -> AsyncIterator[tuple[EventIndex, Fleet, LossyLine]]:
    """A subscriber at the end of a line that may lose batches, once both ends hear each other."""
    fleet, index, line = Fleet(), EventIndex(), LossyLine(publisher)
    fleet.join("http://w:1")
    worker = Worker(0, UpstreamPool(parse_endpoint("http://w:1"), 1.0))
    subscriber = KvSubscriber(worker, index, line.endpoint, publisher.replay_endpoint if replay else None)
    try:
        async with asyncio.timeout(PATIENCE):
            await line.connected(cache)
        yield index, fleet, line
    finally:
        subscriber.close()
        line.close()


@pytest.mark.parametrize("replay", [True, False])
def test_after_a_gap_what_was_lost_is_asked_for_or_all_belief_is_dropped(
    replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost batches hold a removal: the old prompt must not be credited, whether or not they can be had again."""
    monkeypatch.setattr(kv_subscriber, "SILENCE", 2 * PATIENCE)
    cache = PrefixCache(8, BLOCK)
    old, lost, kept, after = (list(range(start, start + 64)) for start in range(0, 4_000, 1_000))

    async def run(publisher: EventPublisher) -> None:
        async with following(publisher, cache, replay=replay) as (index, fleet, line):
            store(cache, old)
            await until(lambda: believed(index, fleet, old) == 64)
            line.losing = True
            store(cache, lost)
            store(cache, kept)
            await until(lambda: believed(line.truth, fleet, kept) == 64)
            assert believed(index, fleet, old) == 64, "nothing tells of a gap before the next batch"
            line.losing = False
            store(cache, after)
            await until(lambda: believed(index, fleet, after) == 64)
            assert cache.match([*old, 0]).num_tokens == believed(index, fleet, old) == 0
            assert believed(index, fleet, kept) == (64 if replay else 0)
            assert index.num_blocks(0) == (cache.num_cached_blocks if replay else 4)

    with EventPublisher(cache, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:
        asyncio.run(run(publisher))


def test_the_last_batch_before_a_silence_is_asked_for_when_it_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_subscriber, "SILENCE", 0.2)
    cache = PrefixCache(8, BLOCK)
    old, lost = list(range(64)), list(range(1_000, 1_128))

    async def run(publisher: EventPublisher) -> None:
        async with following(publisher, cache) as (index, fleet, line):
            store(cache, old)
            await until(lambda: believed(index, fleet, old) == 64)
            line.losing = True
            store(cache, lost)
            await until(lambda: believed(index, fleet, lost) == 128)
            assert believed(index, fleet, old) == 0

    with EventPublisher(cache, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:
        asyncio.run(run(publisher))


def test_a_restarted_worker_is_not_credited_with_what_it_had() -> None:
    port, replay_port = free_port(), free_port()
    addresses = (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}")
    old, new = list(range(64)), list(range(500, 564))
    first = EventPublisher(cache := PrefixCache(50, BLOCK), *addresses)
    store(cache, old)

    async def test(index: EventIndex, fleet: Fleet) -> None:
        await until(lambda: believed(index, fleet, old) == 64)
        store(cache, list(range(5_000, 5_064)))
        await until(lambda: index.num_blocks(0) == 8)
        await asyncio.to_thread(first.close)
        restarted = PrefixCache(50, BLOCK)
        second = EventPublisher(restarted, *addresses)
        try:
            await asyncio.sleep(0.5)
            store(restarted, new)
            await until(lambda: believed(index, fleet, new) == 64)
            assert believed(index, fleet, old) == 0
            assert index.num_blocks(0) == 4
        finally:
            await asyncio.to_thread(second.close)

    with_subscriber(first, test)


def test_tokens_of_a_prompt_are_those_of_the_tokenizer() -> None:
    prompts = TokenPrompts("bytes", lambda: BLOCK)
    text = json.dumps({"model": "m", "prompt": "abcd" * 40}).encode()
    refined = prompts.refine(text_request(b"x"), text, adapter="", salt="")
    assert refined.num_tokens == 40
    assert refined.tokens_per_key == BLOCK
    ids = json.dumps({"model": "m", "prompt": list(range(40))}).encode()
    by_ids = prompts.refine(text_request(b"x"), ids, adapter="", salt="")
    assert by_ids.keys.tolist() == token_request(np.arange(40, dtype=np.int32), block_size=BLOCK).keys.tolist()
    unusable = text_request(b"x")
    assert prompts.refine(unusable, b'{"model": "m"}', adapter="", salt="") is unusable


@pytest.mark.parametrize("policy", ["cost", "prefix_exact"])
def test_the_gateway_sends_to_the_worker_that_says_it_holds_the_prompt(
    policy: str,
    tmp_path: Path,
    start_worker: Callable[[], SmallWorker],
    start_gateway: Callable[..., RunningGateway],
) -> None:
    """Another gateway's requests filled the cache of one worker: here only its events can tell."""
    log = tmp_path / "access.log"
    cache = PrefixCache(1_000, BLOCK)
    with EventPublisher(cache, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0") as publisher:
        holder = start_worker()
        flags = ["--kv-events", publisher.endpoint, "--kv-replay", str(publisher.replay_endpoint)]
        gateway = start_gateway([holder], "--policy", policy, "--tokenizer", "bytes", "--access-log", str(log), *flags)
        body = chat_body("what was it?", system="a long story " * 100)
        prompts = TokenPrompts("bytes", lambda: BLOCK)
        raw = json.dumps(body).encode()
        tokens = prompts._encoder.encode([_parsed(raw)])[0]
        store(cache, tokens.tolist())

        def predicted() -> int:
            gateway.client.post("/v1/chat/completions", content=raw)
            eventually(lambda: log.exists() and log.read_text().endswith("\n"), "the access log")
            return int(json.loads(log.read_text().splitlines()[-1]).get("predicted_cached_tokens", 0))

        whole_blocks = len(tokens) // BLOCK * BLOCK
        assert eventually(lambda: predicted() >= whole_blocks - 1, "the events to be followed")


def _parsed(raw: bytes) -> Request:

    return parse_object(json.loads(raw), 0)[0]
