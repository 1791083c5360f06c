"""The bounded queue in front of the workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from caudex.gateway.http_messages import HttpError


class Admission:
    """At most `capacity()` requests are with workers, at most `max_queue` wait, in order of arrival, no longer than
    `timeout` seconds. Whoever finds the queue full is told 429 and when to come again."""

    def __init__(self, capacity: Callable[[], int], max_queue: int, timeout: float) -> None:
        self._capacity = capacity
        self._max_queue = max_queue
        self._timeout = timeout
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0
        self._seconds_per_request = 1.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> None:
        """Returns when the request may go on; every enter needs one `leave`. HttpError 429 if it may not."""
        if self.running < self._capacity() and not self._waiting:
            self.running += 1
            return
        if len(self._waiting) >= self._max_queue:
            raise HttpError(429, "all workers are busy and the queue is full", "overloaded_error", self._retry_after())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._timeout):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(0.0)  # the turn came in the moment in which it was given up
            if isinstance(error, asyncio.CancelledError):
                raise
            message = f"no worker was free within {self._timeout:g} s"
            raise HttpError(429, message, "overloaded_error", self._retry_after()) from None
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def leave(self, seconds: float) -> None:
        """A request is done after so many seconds; the next in line goes on."""
        self.running -= 1
        if seconds > 0:
            self._seconds_per_request += 0.05 * (seconds - self._seconds_per_request)
        self.pump()

    def pump(self) -> None:
        """Lets in whoever fits; to be called when the capacity has grown."""
        while self._waiting and self.running < self._capacity():
            turn = self._waiting.popleft()
            if not turn.done():
                self.running += 1
                turn.set_result(None)

    def release_all(self, error: HttpError) -> None:
        """Nobody can be served: tells all who wait."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _retry_after(self) -> float:
        return min(60.0, (len(self._waiting) + 1) * self._seconds_per_request / max(1, self._capacity()))
