"""Round robin: every eligible worker in turn."""

from __future__ import annotations

import numpy as np

from caudex.routing.fleet import Fleet
from caudex.routing.policy import Stateless
from caudex.routing.ranking import Ranking, Reason
from caudex.routing.request import RouteRequest


class RoundRobinPolicy(Stateless):
    """Good for: equal requests on equal workers. Not for: prefix locality, or prompts of very different lengths."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._next = 0

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        turns = (np.arange(fleet.num_slots, dtype=np.float64) - self._next) % max(1, fleet.num_slots)
        cost = np.where(fleet.eligible(request.model), turns, np.inf)
        return Ranking(cost, Reason.ROUND_ROBIN, self._rng)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        self._next = worker + 1
