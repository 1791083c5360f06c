"""From the engine's thread to the event loop: the requests behind one HTTP request, as one stream of outputs."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from caudex.engine.types import EngineDeadError, GenerationRequest, InvalidRequestError, RequestOutput
from caudex.server.errors import APIError, engine_dead

if TYPE_CHECKING:
    from caudex.engine.engine import Engine
    from caudex.server.metrics import Metrics, RequestTimer


MAX_APART = 32
"""Outputs that wait for a reader one by one; more are joined."""


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """What the engine has made of one choice: the output of a step, or of several if its reader is behind."""

    choice: int
    output: RequestOutput


class Inbox:
    """Outputs of one HTTP request's choices that its reader has not taken yet.

    A reader that keeps up takes the output of every step by itself. Behind `MAX_APART` that wait, as the client reads
    slowly or not at all, each choice's are joined into one: a token then costs its text and its id, rather than some
    objects and an event of its own, and nothing is lost. An output that ends a choice by a failure stays by itself.
    They are joined when `MAX_APART` more wait, since to join copies all that is there.

    All methods are the event loop's.
    """

    def __init__(self, timer: RequestTimer) -> None:
        self._timer = timer
        self._items: list[ChoiceOutput] = []
        self._room = MAX_APART
        self._reader: asyncio.Future[None] | None = None

    def put(self, choice: int, output: RequestOutput, made_at: float) -> None:
        """Take in an output that the engine made at `made_at` (`time.perf_counter`)."""
        self._timer.observe(choice, output, made_at)
        if len(self._items) >= self._room:
            self._join()
            self._room = MAX_APART + len(self._items)
        self._items.append(ChoiceOutput(choice, output))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[ChoiceOutput]:
        """All that is there, of each choice in order; waits until there is something."""
        while not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        items, self._items, self._room = self._items, [], MAX_APART
        return items

    def _join(self) -> None:
        made: defaultdict[int, list[RequestOutput]] = defaultdict(list)
        for item in self._items:
            if not item.output.has_failed:
                made[item.choice].append(item.output)
        joined = [ChoiceOutput(choice, RequestOutput.joined(outputs)) for choice, outputs in made.items()]
        self._items = joined + [item for item in self._items if item.output.has_failed]


class OutputBridge:
    """Carries outputs from the engine's thread to the inboxes on the loop.

    What an engine step gives to all its requests travels together. The loop is woken once, when the step has given its
    last output: a loop that wakes at the first fights the engine's thread for the interpreter lock over the rest.

    `deliver` and `flush` are for the engine's thread; they return at once and never raise.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[Inbox, int, RequestOutput, float]] = deque()

    def deliver(self, inbox: Inbox, choice: int, output: RequestOutput) -> None:
        self._pending.append((inbox, choice, output, time.perf_counter()))

    def flush(self) -> None:
        """Wake the loop for what has been delivered."""
        if not self._pending:
            return
        try:
            self._loop.call_soon_threadsafe(self._distribute)
        except RuntimeError:  # The loop closed before the engine did: nobody is left to read.
            self._pending.clear()

    def _distribute(self) -> None:
        while self._pending:
            inbox, choice, output, made_at = self._pending.popleft()
            inbox.put(choice, output, made_at)


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
        self._unfinished: set[int] = set()

    async def __aenter__(self) -> Self:
        if not self._engine.is_alive:
            raise engine_dead(self._engine.error)
        self._inbox = Inbox(self._metrics.timer(self._requests, time.perf_counter()))
        if any(request.sampling.grammar for request in self._requests):
            await self._submit_beside_loop()
        else:
            self._submit_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abort()

    async def outputs(self) -> AsyncIterator[list[ChoiceOutput]]:
        """Yield what the engine has made, as it is made and of each choice in order, until every choice has finished.

        Raises:
            APIError: the engine failed on a choice, or gave it up, and all that was made before has been yielded; the
                other choices are aborted when the context is left.
        """
        while self._unfinished:
            items = await self._inbox.take()
            self._unfinished.difference_update(item.choice for item in items if item.output.finish_reason is not None)
            good = [item for item in items if not item.output.has_failed]
            if good:
                yield good
            for item in items:
                raise_if_failed(item.output)

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
        inbox, deliver = self._inbox, self._bridge.deliver

        def on_output(output: RequestOutput) -> None:
            deliver(inbox, choice, output)

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
