"""What each worker holds, by its own KV events: the exact index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caudex import _core
from caudex.routing.fleet import Fleet
from caudex.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from caudex.routing.request import RouteRequest, namespace_root


class EventIndex:
    """Follows the KV events of all workers. A block is known by its tokens and those before it, so workers may hash
    with seeds and algorithms of their own. All workers share one block size, set by the first event.

    A salt or an adapter is part of a block's name, as it is of a request's, so prompts of different salts share
    nothing here. Events name no tenant: a worker that keeps tenants of one salt apart by itself (API keys of its own)
    may be credited with what another tenant stored, which sends a request there in vain and can show it nothing.

    An event below a block that is unknown (an earlier event was lost) is dropped and counted in `orphans`: what hangs
    from it cannot be told apart from another prefix, and crediting it would be wrong.
    """

    def __init__(self) -> None:
        self._directory: _core.BlockDirectory | None = None
        self.orphans = 0
        self.foreign_block_sizes = 0

    @property
    def block_size(self) -> int | None:
        """None until the first event."""
        return None if self._directory is None else self._directory.block_size

    def apply(self, worker: int, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self._store(worker, event)
        elif self._directory is None:
            return
        elif isinstance(event, BlocksRemoved):
            self._directory.remove(worker, event.hashes)
        elif isinstance(event, AllBlocksCleared):
            self._directory.clear(worker)

    def num_blocks(self, worker: int) -> int:
        return 0 if self._directory is None else self._directory.num_blocks(worker)

    def cached_tokens(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.float64]:
        """Tokens of the request that lie in cached blocks, by slot."""
        if self._directory is None or request.tokens_per_key != self._directory.block_size:
            return np.zeros(fleet.num_slots)
        return self._directory.cached_tokens(request.keys, fleet.num_slots, request.tokens_per_key, request.num_tokens)

    def used_tokens(self, request: RouteRequest, fleet: Fleet) -> NDArray[np.float64]:
        if self._directory is None:
            return np.zeros(fleet.num_slots)
        return self._directory.used_tokens(fleet.num_slots, self._directory.block_size)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        """What was sent does not count; what the worker says it stored does."""

    def forget(self, worker: int) -> None:
        if self._directory is not None:
            self._directory.clear(worker)

    def dump(self) -> bytes:
        """Nothing is kept: after a restart the workers replay their events."""
        return b""

    def load(self, state: bytes) -> None:
        if state:
            raise ValueError(f"an index of events keeps no state, but was given {len(state)} bytes of it")

    def _store(self, worker: int, event: BlocksStored) -> None:
        if self._directory is None:
            self._directory = _core.BlockDirectory(event.block_size)
        if event.block_size != self._directory.block_size:
            self.foreign_block_sizes += 1
            return
        if event.parent is None:
            parent: int | None = namespace_root(event.adapter, event.salt)
        else:
            parent = self._directory.find(worker, event.parent)
        if parent is None:
            self.orphans += 1
            return
        self._directory.store(worker, parent, event.hashes, event.tokens)
