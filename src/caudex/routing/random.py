"""Random: every eligible worker with equal chance."""

from __future__ import annotations

import numpy as np

from caudex.routing.fleet import Fleet
from caudex.routing.policy import Stateless
from caudex.routing.ranking import Ranking, Reason
from caudex.routing.request import RouteRequest


class RandomPolicy(Stateless):
    """Good for: a baseline. Not for: prefix locality, which n workers cut to about 1/n of what is shared by few."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cost = np.where(fleet.eligible(request.model), 0.0, np.inf)
        return Ranking(cost, Reason.RANDOM, self._rng)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        """Chance has no memory."""
