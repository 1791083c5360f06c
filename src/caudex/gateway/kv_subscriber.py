"""Follows one worker's KV events over ZeroMQ."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from caudex.gateway.upstream_pool import Endpoint
from caudex.gateway.worker import Worker
from caudex.routing.event_index import EventIndex
from caudex.routing.kv_events import decode_batch

log = logging.getLogger("caudex.gateway")

_END_OF_REPLAY = (1 << 64) - 1
_REPLAY_TIMEOUT = 5.0

SILENCE = 5.0
"""Seconds without an event after which one asks whether any was lost: only the next one would show the gap."""


def publisher_address(pattern: str, worker: Endpoint) -> str:
    """Where a worker publishes: a * stands for its host, and a port such as +1000 for its own port plus 1000, by which
    several workers of one host are told apart."""
    address, _, port = pattern.replace("*", worker.host).rpartition(":")
    return f"{address}:{worker.port + int(port)}" if port.startswith("+") else f"{address}:{port}"


class KvSubscriber:
    """Keeps the index in step with what a worker publishes: frames [topic, sequence number, batch].

    Numbers count up by one from zero. On a gap, and after a silence, what is missing is asked for on the replay socket;
    where there is none, or it no longer has it, all that is believed of the worker is dropped, since a removal may be
    among what was lost.
    A number lower than expected is a new publisher: its cache began empty, and so does the index.
    """

    def __init__(self, worker: Worker, index: EventIndex, endpoint: str, replay_endpoint: str | None) -> None:
        try:
            import zmq.asyncio
        except ImportError as error:
            raise ValueError("following KV events needs ZeroMQ: pip install 'caudex[events]'") from error
        self._zmq: Any = zmq
        self._context = zmq.asyncio.Context.instance()
        self._worker = worker
        self._index = index
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._expected = 0
        self._task = asyncio.create_task(self._follow(), name=f"KV events of {worker.url}")

    def close(self) -> None:
        self._task.cancel()

    async def _follow(self) -> None:
        socket = self._context.socket(self._zmq.SUB)
        socket.setsockopt(self._zmq.SUBSCRIBE, b"")
        socket.setsockopt(self._zmq.RCVHWM, 0)
        socket.connect(self._endpoint)
        try:
            await self._catch_up()
            while True:
                if not await socket.poll(SILENCE * 1000):
                    await self._catch_up()
                    continue
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    await self._take(int.from_bytes(frames[1], "big"), frames[2])
        finally:
            socket.close(linger=0)

    async def _take(self, number: int, payload: bytes) -> None:
        if number < self._expected:
            log.warning("worker %s publishes its KV events from the start again", self._worker.url)
            self._begin_anew(0)
        if number > self._expected:
            await self._catch_up()
        if number > self._expected:
            if self._expected:
                log.warning("KV events %d to %d of worker %s are lost", self._expected, number - 1, self._worker.url)
            self._begin_anew(number)
        if number == self._expected:
            self._apply(number, payload)

    async def _catch_up(self) -> None:
        """Asks for what was published since the last event taken."""
        if self._replay_endpoint is None:
            return
        socket = self._context.socket(self._zmq.DEALER)
        socket.connect(self._replay_endpoint)
        try:
            async with asyncio.timeout(_REPLAY_TIMEOUT):
                await socket.send_multipart([b"", self._expected.to_bytes(8, "big")])
                while True:
                    *_, number_frame, payload = await socket.recv_multipart()
                    number = int.from_bytes(number_frame, "big")
                    if number == _END_OF_REPLAY:
                        return
                    if number > self._expected:
                        self._begin_anew(number)
                    if number == self._expected:
                        self._apply(number, payload)
        except TimeoutError:
            return
        finally:
            socket.close(linger=0)

    def _apply(self, number: int, payload: bytes) -> None:
        self._expected = number + 1
        try:
            for event in decode_batch(payload):
                self._index.apply(self._worker.slot, event)
        except ValueError as error:
            log.warning("KV event %d of worker %s: %s", number, self._worker.url, error)
            self._index.forget(self._worker.slot)

    def _begin_anew(self, number: int) -> None:
        self._index.forget(self._worker.slot)
        self._expected = number
