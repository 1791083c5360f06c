"""Prefix affinity: where the longest prefix is, unless work is piling up there."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caudex.routing.fleet import Fleet
from caudex.routing.ranking import Ranking, Reason
from caudex.routing.request import RouteRequest
from caudex.routing.sent_index import SentIndex


class PrefixIndex(Protocol):
    """What is believed to be cached where."""

    def cached_tokens(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.float64]: ...

    def used_tokens(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.float64]: ...

    def record(self, request: RouteRequest, worker: int, now: float) -> None: ...

    def forget(self, worker: int) -> None: ...

    def dump(self) -> bytes: ...

    def load(self, state: bytes) -> None: ...


def prefix_reasons(cached: NDArray[np.float64]) -> NDArray[np.int8]:
    """PREFIX for who holds the longest, REPLICATE for all others while somebody holds some, LOAD if nobody does."""
    longest = cached.max(initial=0.0)
    if longest <= 0:
        return np.full(len(cached), Reason.LOAD, dtype=np.int8)
    return np.where(cached >= longest, np.int8(Reason.PREFIX), np.int8(Reason.REPLICATE))


class PrefixPolicy:
    """Least tokens of work: the request's own uncached tokens plus what the worker has at hand and had of late.

    Longest prefix alone sends all that share a system prompt to one worker; here each token of work already there
    weighs as much as a token of prefix, so a hot prefix spreads as soon as its worker falls behind by its length. The
    work of late counts too, fading, since a queue that is short at this moment says little of a worker that is always
    chosen. Equal costs go to the worker with the most free cache. O(workers + keys + nodes on the path).

    Good for: workers of one kind. Not for: mixed hardware (use `cost`).
    """

    def __init__(self, *, index: PrefixIndex | None = None, recent_weight: float = 0.1, seed: int = 0) -> None:
        if recent_weight < 0:
            raise ValueError(f"recent_weight is {recent_weight}; it must not be negative")
        self.index: PrefixIndex = SentIndex() if index is None else index
        self._recent_weight = recent_weight
        self._rng = np.random.default_rng(seed)

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cached = self.index.cached_tokens(request, fleet)
        work = fleet.load_tokens() + self._recent_weight * fleet.recent_tokens(now)
        cost = np.where(fleet.eligible(request.model), work - cached, np.inf)
        used = self.index.used_tokens(request, fleet) - fleet.capacity_tokens
        return Ranking(cost, prefix_reasons(cached), self._rng, used=used, cached=cached)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        self.index.record(request, worker, now)

    def forget(self, worker: int) -> None:
        self.index.forget(worker)

    def dump(self) -> bytes:
        return self.index.dump()

    def load(self, state: bytes) -> None:
        self.index.load(state)
