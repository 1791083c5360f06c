"""Routing without time: each request finished before the next, to isolate what a policy does to the hit rate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudex.cache import PrefixCache
from caudex.routing import Fleet, Policy, RouteRequest
from caudex.simulate.replica import DEFAULT_EVICTION
from caudex.simulate.workload import Workload


@dataclass(frozen=True, slots=True)
class SequentialResult:
    """Token hit rate over all replicas, and prompt tokens that each computed."""

    hit_rate: float
    computed_by_replica: NDArray[np.float64]

    @property
    def imbalance(self) -> float:
        return float(self.computed_by_replica.max() / self.computed_by_replica.mean())


def replay_sequentially(
    workload: Workload, policy: Policy, *, num_replicas: int, num_blocks: int, eviction: str = DEFAULT_EVICTION
) -> SequentialResult:
    """Routes the requests at their arrival times; each leaves its whole prompt blocks in its replica's cache.

    Hits are the leading cached whole blocks, at most (input_length - 1) // block_size of them.
    """
    fleet = Fleet()
    for number in range(num_replicas):
        fleet.join(f"replica-{number}", capacity_tokens=float(num_blocks * workload.block_size))
    caches = [PrefixCache(num_blocks, 1, policy=eviction, manual_clock=True) for _ in range(num_replicas)]
    computed = np.zeros(num_replicas)
    for i, now in enumerate(workload.arrivals.tolist()):
        length = int(workload.input_lengths[i])
        request = RouteRequest(workload.keys(i), float(workload.block_size), length, session=workload.sessions[i])
        best = policy.rank(request, fleet, now).best
        assert best is not None
        policy.record(request, best.worker, now)
        flight = fleet.dispatch(best.worker, length, best.cached_tokens or 0, now)
        hits = _visit(caches[best.worker], workload, i, now)
        fleet.first_token(flight, now)
        fleet.land(flight, now)
        computed[best.worker] += length - hits
    return SequentialResult(1.0 - float(computed.sum() / workload.input_lengths.sum()), computed)


def _visit(cache: PrefixCache, workload: Workload, i: int, now: float) -> int:
    """Tokens that the cache had of a request, which then leaves its blocks there, as far as they fit."""
    size, length = workload.block_size, int(workload.input_lengths[i])
    path = workload.path(i)[: cache.num_blocks]
    if not len(path):
        return 0
    cache.set_time(now)
    # One more token than there are blocks: a prompt that is cached whole then needs no block of its own to recompute.
    sequence = cache.begin(np.append(path, np.int32(workload.own_id(i))))
    matched = sequence.num_cached_tokens
    sequence.allocate(len(path))
    sequence.commit(len(path))
    sequence.release()
    return min(matched, (length - 1) // size) * size
