"""What each worker was sent: the approximate index of who holds which prefix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caudex import _core
from caudex.routing.fleet import DEFAULT_CAPACITY_TOKENS, Fleet
from caudex.routing.request import BYTES_PER_TOKEN, TEXT_CHUNK_BYTES, RouteRequest


class SentIndex:
    """Believes that a worker holds what it was sent, least recently sent forgotten first, as its own cache would.

    Bounded three ways: a worker's share is its KV capacity in keys, entries fade after `idle_seconds`, and a tree node
    lives only while some worker holds it. Whole prompts count, however long. Matching and inserting are compiled; see
    cpp/routing/prefix_tree.hpp for the invariants.
    """

    def __init__(self, *, idle_seconds: float = 3_600.0) -> None:
        if idle_seconds <= 0:
            raise ValueError(f"idle_seconds is {idle_seconds}; it must be above 0")
        self._idle_seconds = idle_seconds
        self._tree = _core.PrefixTree(int(DEFAULT_CAPACITY_TOKENS * BYTES_PER_TOKEN / TEXT_CHUNK_BYTES))
        self._fleet_epoch = -1

    def cached_tokens(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.float64]:
        """Tokens of the request believed cached, by slot; at least one token of any request is always computed."""
        if fleet.epoch != self._fleet_epoch:
            self._follow_capacities(request, fleet)
        return self._tree.cached_tokens(request.keys, fleet.num_slots, request.tokens_per_key, request.num_tokens)

    def used_tokens(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.float64]:
        """Tokens believed cached in all, by slot."""
        return self._tree.used_tokens(fleet.num_slots, request.tokens_per_key)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        self._tree.insert(worker, request.keys, now)
        self._tree.expire(worker, now - self._idle_seconds)

    def sent_since(
        self, time: float, request: RouteRequest, fleet: Fleet
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Forgets what was sent before `time`; the tokens that are left, and those that the request shares, by slot."""
        if fleet.epoch != self._fleet_epoch:
            self._follow_capacities(request, fleet)
        return self._tree.sent_since(time, request.keys, fleet.num_slots, request.tokens_per_key, request.num_tokens)

    def forget(self, worker: int) -> None:
        self._tree.forget(worker)

    def dump(self) -> bytes:
        return self._tree.dump()

    def load(self, state: bytes) -> None:
        self._tree.load(state)

    @property
    def num_bytes(self) -> int:
        return self._tree.num_bytes

    @property
    def num_nodes(self) -> int:
        return self._tree.num_nodes

    def _follow_capacities(self, request: RouteRequest, fleet: Fleet) -> None:
        self._fleet_epoch = fleet.epoch
        for slot, tokens in enumerate(fleet.capacity_tokens):
            self._tree.set_capacity(slot, max(1, int(tokens / request.tokens_per_key)))
