"""Least loaded, by the power of two choices."""

from __future__ import annotations

import numpy as np

from caudex.routing.fleet import Fleet
from caudex.routing.policy import Stateless
from caudex.routing.ranking import Ranking, Reason
from caudex.routing.request import RouteRequest


class LeastLoadedPolicy(Stateless):
    """The lighter, in tokens of work at hand, of two workers drawn at random; the others follow by load.

    Two choices and not the minimum of all: several gateways with views a second old would all pick the same minimum.
    M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, IEEE TPDS 12(10), 2001.

    Good for: prompts that share nothing. Not for: prefix locality.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        eligible = fleet.eligible(request.model)
        load = fleet.load_tokens()
        cost = np.where(eligible, load, np.inf)
        slots = eligible.nonzero()[0]
        if len(slots) > 2:
            drawn = self._rng.choice(slots, size=2, replace=False)
            # Below every load, so that the pair stands first and in its own order.
            cost[drawn] -= 1.0 + load.max()
        return Ranking(cost, Reason.LOAD, self._rng)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        """The load it goes by is the fleet's."""
