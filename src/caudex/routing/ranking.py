"""What a policy answers: the workers in order of preference, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from caudex import _core


class Reason(IntEnum):
    """Why a worker stands where it does in a ranking."""

    RANDOM = 0
    ROUND_ROBIN = 1
    LOAD = 2
    """Nothing is cached anywhere, or the policy does not look: the lighter worker."""
    SESSION = 3
    """The session lives there."""
    HASH = 4
    """The hash of the prefix or session says so."""
    PREFIX = 5
    """The longest cached prefix is there."""
    REPLICATE = 6
    """A longer prefix is cached elsewhere, but computing it again here is quicker or hurts others less."""

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker of a ranking, with what the policy believes is cached there (None: it cannot say)."""

    worker: int
    reason: Reason
    cached_tokens: int | None


class Ranking:
    """Workers by ascending cost. The best is known at once; the others are sorted only if somebody asks for them.

    `cost`, `reasons` and `cached` are indexed by worker slot; a worker that may not be chosen has cost infinity.
    Equal costs: the most of the `capacity` left, of which so much is `used`, then chance, never the order of the list.
    """

    __slots__ = ("_best", "_cached", "_capacity", "_cost", "_first", "_reasons", "_rng", "_used")

    def __init__(
        self,
        cost: NDArray[np.float64],
        reasons: NDArray[np.int8] | Reason,
        rng: np.random.Generator,
        *,
        used: NDArray[np.float64] | None = None,
        capacity: NDArray[np.float64] | None = None,
        cached: NDArray[np.float64] | None = None,
    ) -> None:
        self._cost = cost
        self._reasons = reasons
        self._rng = rng
        self._used = used
        self._capacity = capacity
        self._cached = cached
        self._first: Candidate | None = None
        self._best = _core.cheapest(cost, used, capacity, rng.random)

    @property
    def best(self) -> Candidate | None:
        """The first choice, or None where no worker may be chosen."""
        if self._first is None and self._best >= 0:
            self._first = self._candidate(self._best)
        return self._first

    def __iter__(self) -> Iterator[Candidate]:
        if self._best < 0:
            return
        yield self._candidate(self._best)
        for worker in self._sorted():
            if worker != self._best and self._cost[worker] != np.inf:
                yield self._candidate(worker)

    def _sorted(self) -> list[int]:
        nothing = np.zeros(len(self._cost))
        taken = (nothing if self._used is None else self._used) - (
            nothing if self._capacity is None else self._capacity
        )
        order: list[int] = np.lexsort((self._rng.random(len(self._cost)), taken, self._cost)).tolist()
        return order

    def _candidate(self, worker: int) -> Candidate:
        cached = None if self._cached is None else int(self._cached[worker])
        return Candidate(worker, self._reason(worker), cached)

    def _reason(self, worker: int) -> Reason:
        return self._reasons if isinstance(self._reasons, Reason) else Reason(int(self._reasons[worker]))
