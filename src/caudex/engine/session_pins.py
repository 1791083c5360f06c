"""Conversations that will be back: their blocks are kept across the pause."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from caudex.cache import OutOfBlocks, Pin, PrefixCache
from caudex.engine.batch import Int32Array
from caudex.engine.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class _KeptSession:
    pin: Pin
    expires: float


class SessionPins:
    """Pins on what finished requests left in the cache, each until its time is over.

    A conversation that calls a tool is silent for some seconds, in which its blocks would grow old and go. A request
    may ask that they stay (`cache_ttl`); the next request of the same session takes the pin's place. All pins together
    stay within the cache's pin budget, and give way when a request could not run at all without their blocks.
    """

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._kept: dict[str, _KeptSession] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, session: str, state: SequenceState, seconds: float) -> None:
        """Keep what is cached of a finished request's tokens; beyond the budget it is not kept."""
        self.release(session)
        try:
            pin = self._cache.pin(state.tokens(), state.namespace, tenant=state.tenant)
        except OutOfBlocks:
            return
        self._kept[session] = _KeptSession(pin, self._clock() + seconds)

    def release(self, session: str) -> None:
        """Let go of a session's blocks, if they are kept."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            kept.pin.release()

    def release_expired(self) -> None:
        now = self._clock()
        for session in [name for name, kept in self._kept.items() if kept.expires <= now]:
            self.release(session)

    def release_all(self) -> None:
        for session in list(self._kept):
            self.release(session)

    def blocks(self) -> list[Int32Array]:
        """The blocks of every pin."""
        return [kept.pin.blocks for kept in self._kept.values()]

    def seconds_to_next(self) -> float | None:
        """Until the next pin expires; None if there is none."""
        if not self._kept:
            return None
        return max(0.0, min(kept.expires for kept in self._kept.values()) - self._clock())
