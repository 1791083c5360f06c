"""Cost: where this request sees its first token soonest and hurts others least."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caudex import _core
from caudex.routing.fleet import RECENT_SECONDS, Fleet
from caudex.routing.prefix_index import PrefixAware, PrefixIndex, PrefixRanking
from caudex.routing.ranking import Ranking
from caudex.routing.request import RouteRequest
from caudex.routing.sent_index import SentIndex


class CostPolicy(PrefixAware):
    """Seconds to the first token, this request's and others', estimated for each worker and summed; no thresholds.

        wait      (prefill queued there + decode_tokens per running request + others' requests) / rate
                  + the wait for room: f / (1 - f) x the share of the worker's memory that the request takes x the time
                  that a request stays, where f is the share that is full of what is being read
        work      (uncached tokens + tokens pushed out there x the share of tokens that are wanted again) / rate
        harm      work x (the requests that will come while the wait and half of the work last, and be that much later)
                  + uncached tokens / rate x running requests x `harm_weight`
        later     the wait of those that will build on this request, and so come to the same worker: so many as tokens
                  are wanted again, each u / (1 - u) times the mean request's work at that worker's utilisation u

    What is being read cannot be evicted, and is what was sent there within the time that a request stays in the mean
    (J. Little, Operations Research 9(3), 1961), whatever several requests share counted once. Where prompts fill a good
    part of a worker's memory, it is that and not computation for which they wait.

    A worker's rate is its measured prefill rate. Requests come as they did of late to the mean worker, a in a second;
    to clear a second of work takes 1 / (1 - u), so a / (1 - u) requests find it in their way: the marginal delay of
    work in a queue, as in H. Mendelson, S. Whang, Operations Research 38(5), 1990. What is computed twice thus weighs
    little in an idle fleet, where the shortest wait is all that counts, and much in a busy one, where it is everyone's
    time. A running request that is delayed weighs less than one that waits: it is read at about a tenth of the speed
    at which it is generated.

    Each term is continuous, so a hot prefix is computed again elsewhere exactly when waiting for its worker costs more,
    and no gap in load flips the choice for a millisecond. Equal costs go to the worker with the most free cache, then
    by chance. After Preble's E2 (V. Srivatsa et al., arXiv 2407.00023) in what is weighed, without its two regimes.

    O(workers + keys + nodes on the path).

    Good for: everything. Not for: gateways that must agree without shared state (use `consistent_hash`).
    """

    def __init__(
        self,
        *,
        index: PrefixIndex | None = None,
        decode_tokens: float = 64.0,
        harm_weight: float = 0.1,
        seed: int = 0,
    ) -> None:
        for name, value in (("decode_tokens", decode_tokens), ("harm_weight", harm_weight)):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; it must not be negative")
        super().__init__(index, seed)
        self._decode_tokens = decode_tokens
        self._harm_weight = harm_weight
        self._read_of_late = SentIndex()
        self._reuse = 0.5
        """Share of prompt tokens that were found cached, fading over some hundred requests."""

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cached = self.index.cached_tokens(request, fleet)
        used = self.index.used_tokens(request, fleet)
        cost = self._seconds(request, fleet, cached, used, now)
        ranking = PrefixRanking(cost, cached, used, fleet.capacity_tokens, self._rng)
        if ranking.best is not None:
            found = (ranking.best.cached_tokens or 0) / request.num_tokens
            self._reuse += 0.01 * (found - self._reuse)
        return ranking

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        super().record(request, worker, now)
        self._read_of_late.record(request, worker, now)

    def forget(self, worker: int) -> None:
        super().forget(worker)
        self._read_of_late.forget(worker)

    def _seconds(
        self,
        request: RouteRequest,
        fleet: Fleet,
        cached: NDArray[np.float64],
        used: NDArray[np.float64],
        now: float,
    ) -> NDArray[np.float64]:
        return _core.cost_seconds(
            fleet.eligible(request.model),
            fleet.queued_tokens,
            fleet.running,
            fleet.foreign_requests,
            fleet.recent_tokens(now),
            fleet.recent_requests(now),
            fleet.prefill_rate,
            fleet.capacity_tokens,
            cached,
            used,
            *self._read_of_late.sent_since(now - fleet.stay_seconds, request, fleet),
            num_tokens=request.num_tokens,
            mean_prompt_tokens=fleet.mean_prompt_tokens,
            recent_seconds=RECENT_SECONDS,
            stay_seconds=fleet.stay_seconds,
            reuse=self._reuse,
            decode_tokens=self._decode_tokens,
            harm_weight=self._harm_weight,
        )
