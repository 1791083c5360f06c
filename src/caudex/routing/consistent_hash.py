"""Consistent hashing with bounded loads."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from caudex import _core
from caudex.routing.fleet import Fleet
from caudex.routing.policy import Stateless
from caudex.routing.ranking import Ranking, Reason
from caudex.routing.request import RouteRequest


class ConsistentHashPolicy(Stateless):
    """The worker with the highest hash of (request key, worker), among those whose load is within bounds.

    Rendezvous hashing (D. Thaler, C. Ravishankar, 1998): no ring to keep, workers equally likely, and when one of n
    joins or leaves exactly the keys it wins or had move, 1/n of all. Bounded loads (V. Mirrokni, M. Thorup,
    M. Zadimoghaddam, Consistent Hashing with Bounded Loads, 2016), in tokens and not in requests: a worker whose load
    exceeds `load_factor` times what the mean will be with this request is passed over, so after placement no load
    exceeds load_factor * mean + request. The lowest load is never above the mean, so a worker always qualifies.
    O(workers).

    The request key is the session's if there is one and `by` is not "prefix", else that of the first `prefix_tokens`.

    Good for: many gateways without shared state. Not for: traffic with one prefix that outweighs a worker; it spills
    to the same second worker, which is as it should be, but knows nothing of what was evicted.
    """

    def __init__(
        self,
        *,
        by: Literal["session", "prefix"] = "session",
        prefix_tokens: int = 1_024,
        load_factor: float = 1.25,
        seed: int = 0,
    ) -> None:
        if load_factor <= 1:
            raise ValueError(f"load_factor is {load_factor}; it must be above 1")
        self._by = by
        self._prefix_tokens = prefix_tokens
        self._load_factor = load_factor
        self._rng = np.random.default_rng(seed)
        self._epoch = -1
        self._worker_hashes: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        if fleet.epoch != self._epoch:
            self._worker_hashes = np.array([_core.root_key((name or "").encode()) for name in fleet.ids], np.uint64)
            self._epoch = fleet.epoch
        cost, is_loaded = _core.rendezvous(
            fleet.eligible(request.model),
            self._worker_hashes,
            fleet.in_flight_tokens,
            self._key(request),
            num_tokens=request.num_tokens,
            load_factor=self._load_factor,
        )
        return Ranking(cost, Reason.LOAD if is_loaded else Reason.HASH, self._rng)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        """The hash needs no memory."""

    def _key(self, request: RouteRequest) -> int:
        if self._by == "session" and request.session is not None:
            return _core.root_key(f"{request.tenant}\0{request.session}".encode())
        if not len(request.keys):
            return _core.root_key(str(self._rng.random()).encode())
        return request.prefix_key(self._prefix_tokens)
