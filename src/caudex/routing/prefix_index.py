"""What is believed to be cached where, and the part of a policy that goes by it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caudex import _core
from caudex.routing.fleet import Fleet
from caudex.routing.ranking import Ranking, Reason
from caudex.routing.request import RouteRequest
from caudex.routing.sent_index import SentIndex


class PrefixIndex(Protocol):
    """Cached prefixes by worker: `SentIndex` by what was sent, `EventIndex` by what workers say."""

    def cached_tokens(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.float64]: ...

    def used_tokens(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.float64]: ...

    def record(self, request: RouteRequest, worker: int, now: float) -> None: ...

    def forget(self, worker: int) -> None: ...

    def dump(self) -> bytes: ...

    def load(self, state: bytes) -> None: ...


class PrefixRanking(Ranking):
    """A ranking whose reasons follow from what is cached: PREFIX for who holds the longest, REPLICATE for all others
    while somebody holds some, LOAD if nobody does."""

    __slots__ = ("_held",)

    def __init__(
        self,
        cost: NDArray[np.float64],
        held: NDArray[np.float64],
        used: NDArray[np.float64],
        capacity: NDArray[np.float64],
        rng: np.random.Generator,
    ) -> None:
        super().__init__(cost, Reason.LOAD, rng, used=used, capacity=capacity, cached=held)
        self._held = held

    def _reason(self, worker: int) -> Reason:
        longest = _core.largest(self._held)
        if longest <= 0:
            return Reason.LOAD
        return Reason.PREFIX if self._held[worker] >= longest else Reason.REPLICATE


class PrefixAware:
    """The part of `Policy` that is the same for all policies over a prefix index: the state is the index's."""

    def __init__(self, index: PrefixIndex | None, seed: int) -> None:
        self.index: PrefixIndex = SentIndex() if index is None else index
        self._rng = np.random.default_rng(seed)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        self.index.record(request, worker, now)

    def forget(self, worker: int) -> None:
        self.index.forget(worker)

    def dump(self) -> bytes:
        return self.index.dump()

    def load(self, state: bytes) -> None:
        self.index.load(state)
