"""From the engine's thread to the event loop: the requests behind one HTTP request, as one stream of outputs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from caudex.engine.types import EngineDeadError, GenerationRequest, InvalidRequestError, RequestOutput
from caudex.server.errors import APIError, engine_dead

if TYPE_CHECKING:
    from caudex.engine.engine import Engine
    from caudex.server.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One engine output of one choice, with the time (`time.perf_counter`) at which the engine made it."""

    choice: int
    output: RequestOutput
    made_at: float


class OutputBridge:
    """Carries outputs from the engine's thread to the loop's queues.

    An engine step ends with one output for every running request. They travel together: only the first wakes the
    loop (a write to its self-pipe, and a fight for the interpreter lock), the rest lie ready when it gets there.

    `deliver` is for the engine's thread; it returns at once and never raises. The queues are fed on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[asyncio.Queue[ChoiceOutput], ChoiceOutput]] = deque()
        self._awake = False

    def deliver(self, queue: asyncio.Queue[ChoiceOutput], output: ChoiceOutput) -> None:
        self._pending.append((queue, output))
        if self._awake:
            return
        self._awake = True
        try:
            self._loop.call_soon_threadsafe(self._distribute)
        except RuntimeError:  # The loop closed before the engine did: nobody is left to read.
            self._pending.clear()

    def _distribute(self) -> None:
        self._awake = False  # Before the first pop: what is appended from here on wakes the loop again.
        while self._pending:
            queue, output = self._pending.popleft()
            queue.put_nowait(output)


class Generation:
    """Engine requests that answer one HTTP request together; choice i is requests[i].

    Use as an async context manager around `outputs`. Leaving it early, whatever the reason, aborts what still runs,
    and the engine frees its blocks within a step.
    """

    def __init__(
        self, engine: Engine, bridge: OutputBridge, metrics: Metrics, requests: Sequence[GenerationRequest]
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._metrics = metrics
        self._requests = requests
        self._queue: asyncio.Queue[ChoiceOutput] = asyncio.Queue()
        self._unfinished: set[int] = set()

    async def __aenter__(self) -> Self:
        if not self._engine.is_alive:
            raise engine_dead(self._engine.error)
        self._started_at = time.perf_counter()
        if any(request.sampling.grammar for request in self._requests):
            await self._submit_beside_loop()
        else:
            self._submit_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()

    async def outputs(self) -> AsyncIterator[ChoiceOutput]:
        """Yield outputs of all choices in the order the engine made them, until every choice has finished.

        Raises:
            APIError: the engine failed on a choice, or gave it up; the others are aborted when the context is left.
        """
        timer = self._metrics.timer(self._requests, self._started_at)
        while self._unfinished:
            item = await self._queue.get()
            timer.observe(item)
            if item.output.finish_reason is not None:
                self._unfinished.discard(item.choice)
            raise_if_failed(item.output)
            yield item

    async def _submit_beside_loop(self) -> None:
        """Submit from another thread, as compiling a grammar takes up to a second. A client that leaves meanwhile is
        found out afterwards."""
        submitting = asyncio.ensure_future(asyncio.to_thread(self._submit_all))
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda _: self._abort())
            raise

    def _submit_all(self) -> None:
        try:
            for choice in range(len(self._requests)):
                self._submit(choice)
        except BaseException:
            self._abort()
            raise

    def _submit(self, choice: int) -> None:
        queue, bridge, clock = self._queue, self._bridge, time.perf_counter

        def on_output(output: RequestOutput) -> None:
            bridge.deliver(queue, ChoiceOutput(choice, output, clock()))

        try:
            self._engine.submit(self._requests[choice], on_output)
        except InvalidRequestError as exc:
            raise APIError(str(exc), param=exc.field) from None
        except ModuleNotFoundError as exc:
            raise APIError(str(exc), status=501) from None
        except EngineDeadError as exc:
            raise engine_dead(self._engine.error or exc) from None
        self._unfinished.add(choice)

    def _abort(self) -> None:
        for choice in self._unfinished:
            self._engine.abort(self._requests[choice].request_id)
        self._unfinished.clear()


def raise_if_failed(output: RequestOutput) -> None:
    if output.finish_reason == "error" and output.error_field is not None:
        raise APIError(output.error or "the request cannot be served", param=output.error_field)
    if output.finish_reason == "error":
        raise APIError(output.error or "the engine failed on this request", status=500)
    if output.finish_reason == "abort":
        raise APIError("the server gave this request up; it is shutting down", status=503)
