"""Prefix affinity: where the longest prefix is, unless work is piling up there."""

from __future__ import annotations

import numpy as np

from caudex.routing.fleet import Fleet
from caudex.routing.prefix_index import PrefixAware, PrefixIndex, PrefixRanking
from caudex.routing.ranking import Ranking
from caudex.routing.request import RouteRequest


class PrefixPolicy(PrefixAware):
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
        super().__init__(index, seed)
        self._recent_weight = recent_weight

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cached = self.index.cached_tokens(request, fleet)
        work = fleet.load_tokens() + self._recent_weight * fleet.recent_tokens(now)
        cost = np.where(fleet.eligible(request.model), work - cached, np.inf)
        used = self.index.used_tokens(request, fleet)
        return PrefixRanking(cost, cached, used, fleet.capacity_tokens, self._rng)
