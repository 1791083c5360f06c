"""Eviction policies on a log, through the cache's own replay."""

from __future__ import annotations

from caudex.cache.block_trace import BlockTrace

DEFAULT_POLICIES = ("lru",)


class PolicyReplay:
    """Replays one log under several policies."""

    def __init__(self, trace: BlockTrace) -> None:
        self._trace = trace

    def hit_rate(self, policy: str, capacity: int) -> float:
        raise ValueError(f"policy is {policy!r}; known are lru and clairvoyant")
