"""The token hit rate of an LRU cache at every capacity at once, from one pass over a request log."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from caudex.cache.block_trace import BlockTrace


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hits against capacity, exact at every capacity: between two knots the curve is a straight line.

    Where the curve is that of a group of requests (a tenant, an hour), hits and tokens are that group's, in the cache
    that all groups share.
    """

    capacities: NDArray[np.int64]
    """(knots,), blocks, rising from 0. Beyond the last the curve is flat."""
    hit_blocks: NDArray[np.int64]
    """(knots,), blocks served from the cache over the whole log."""
    prompt_tokens: int
    block_size: int

    @overload
    def hit_rate(self, capacity: int) -> float: ...
    @overload
    def hit_rate(self, capacity: NDArray[np.int64]) -> NDArray[np.float64]: ...
    def hit_rate(self, capacity: int | NDArray[np.int64]) -> float | NDArray[np.float64]:
        """Return the fraction of prompt tokens served by an LRU cache of `capacity` blocks."""
        hits = np.interp(capacity, self.capacities, self.hit_blocks)
        rate = np.divide(hits * self.block_size, max(self.prompt_tokens, 1))
        return float(rate) if np.isscalar(capacity) else rate

    @property
    def ceiling(self) -> float:
        """The hit rate of an infinite cache."""
        return float(self.hit_blocks[-1]) * self.block_size / max(self.prompt_tokens, 1)

    def capacity_for(self, fraction: float) -> int:
        """Return the fewest blocks that reach `fraction` of the ceiling."""
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction is {fraction}; it must lie between 0 and 1")
        needed = int(np.ceil(fraction * float(self.hit_blocks[-1])))
        knot = int(np.searchsorted(self.hit_blocks, needed))
        if knot == 0:
            return 0
        low, high = self.hit_blocks[knot - 1], self.hit_blocks[knot]
        start, end = self.capacities[knot - 1], self.capacities[knot]
        return int(start + -(-(needed - low) * (end - start) // (high - low)))


def hit_curve(trace: BlockTrace) -> HitCurve:
    """Return the exact LRU hit curve of a log: Mattson's stack distances, found a run of blocks at a time.

    The cache frees a finished request's blocks tail first, so that the block nearest the root is evicted last, and
    never evicts a block of the request that runs; requests run one after another. Time is O(1) for each branch of the
    tree of blocks and each run that one request touched last on a request's path, and O(log requests) for each request
    it takes blocks from; memory is 8 bytes a distinct block and 4 a request. The GIL is free meanwhile.
    """
    ((capacities, hit_blocks),) = trace.paths.hit_curves(trace.num_reusable_blocks, None, 1)
    return HitCurve(capacities, hit_blocks, trace.prompt_tokens, trace.block_size)


def hit_curves(trace: BlockTrace, labels: ArrayLike) -> dict[Hashable, HitCurve]:
    """Return one exact curve for each distinct label of requests, all sharing one cache.

    `labels` is (requests,): tenants, models, or windows of time such as `trace.timestamps // 3600`. The hits of all
    curves at a capacity add up to those of `hit_curve`.
    """
    names, groups = np.unique(np.asarray(labels), return_inverse=True)
    if len(groups) != len(trace):
        raise ValueError(f"labels has {len(groups)} entries; the trace has {len(trace)} requests")
    curves = trace.paths.hit_curves(trace.num_reusable_blocks, groups.astype(np.int32), len(names))
    tokens = np.bincount(groups, weights=trace.input_lengths, minlength=len(names))
    return {
        name.item(): HitCurve(capacities, hit_blocks, int(tokens[group]), trace.block_size)
        for group, (name, (capacities, hit_blocks)) in enumerate(zip(names, curves, strict=True))
    }
