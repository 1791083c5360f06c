"""Slow, obvious twins of the offline tools: a cache of single blocks, one request after another."""

from __future__ import annotations

import math
from collections import OrderedDict

from caudex.cache.block_trace import BlockTrace


def paths(trace: BlockTrace) -> list[tuple[list[int], int]]:
    """Return each request's full blocks, and how many of them may be served (one token is always computed)."""
    block_ids, offsets = trace.block_ids()
    requests = []
    for i, length in enumerate(trace.input_lengths.tolist()):
        ids = block_ids[offsets[i] : offsets[i + 1]].tolist()
        requests.append((ids, min(len(ids), max(length - 1, 0) // trace.block_size)))
    return requests


def leading(ids: list[int], cached: object) -> int:
    """Return the length of the leading run of `ids` that is in `cached`."""
    return next((n for n, block in enumerate(ids) if block not in cached), len(ids))  # type: ignore[operator]


def lru_hits(trace: BlockTrace, capacity: int) -> list[int]:
    """Blocks served to each request by an LRU cache that frees tail first and protects the running request."""
    cache: OrderedDict[int, None] = OrderedDict()  # least recent first
    hits = []
    for ids, reusable in paths(trace):
        hits.append(leading(ids[:reusable], cache))
        kept = ids[:capacity]
        for block in kept:
            cache.pop(block, None)
        while len(cache) + len(kept) > capacity:
            cache.popitem(last=False)
        cache.update((block, None) for block in reversed(kept))
    return hits


def clairvoyant_hits(trace: BlockTrace, capacity: int) -> list[int]:
    """Blocks served to each request by a cache that evicts what is wanted farthest ahead, of equals the deeper."""
    requests = paths(trace)
    uses: dict[int, list[int]] = {}
    depth = {}
    for i, (ids, reusable) in enumerate(requests):
        depth.update((block, at) for at, block in enumerate(ids))
        for block in ids[:reusable]:
            uses.setdefault(block, []).append(i)
    cache: set[int] = set()
    hits = []
    for i, (ids, reusable) in enumerate(requests):
        hits.append(leading(ids[:reusable], cache))
        kept = set(ids[:capacity])
        others = cache - kept

        def farthest(block: int, now: int = i) -> tuple[float, int]:
            return min((use for use in uses.get(block, []) if use > now), default=math.inf), depth[block]

        while len(others) + len(kept) > capacity:
            others.remove(max(others, key=farthest))
        cache = others | kept
    return hits
