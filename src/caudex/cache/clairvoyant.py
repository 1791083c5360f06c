"""The bound on what any eviction policy can reach: the cache that knows the future."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudex.cache.block_trace import BlockTrace


@dataclass(frozen=True, slots=True)
class ClairvoyantBound:
    """What a cache of `capacity` blocks could have served."""

    capacity: int
    hit_blocks: NDArray[np.int64]
    """(requests,), blocks served to each request."""
    hit_tokens: int
    prompt_tokens: int

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens served from the cache."""
        return self.hit_tokens / max(self.prompt_tokens, 1)


def clairvoyant(trace: BlockTrace, capacities: Iterable[int]) -> list[ClairvoyantBound]:
    """Return the bound at each capacity: evict the block whose next hittable use is farthest, of equals the deeper.

    The running request's blocks are never evicted; one that is longer than the whole cache keeps the blocks nearest
    the root. Each capacity costs O(log requests) for every run of blocks with one next use, after one pass shared by
    all. The GIL is free meanwhile. (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer",
    1966.)
    """
    wanted = list(capacities)
    for capacity in wanted:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}; it must be 0 blocks or more")
    hits = trace.paths.clairvoyant_hits(trace.num_reusable_blocks, wanted)
    return [
        ClairvoyantBound(capacity, blocks, int(blocks.sum()) * trace.block_size, trace.prompt_tokens)
        for capacity, blocks in zip(wanted, hits, strict=True)
    ]
