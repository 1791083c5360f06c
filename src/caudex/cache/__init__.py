"""Floor 2: the prefix cache. Blocks, namespaces, eviction policies, stats, events; nothing about models or HTTP."""

from caudex._core import (
    BlockCopy,
    CacheStats,
    EndedRequest,
    Explanation,
    Match,
    Occupancy,
    OutOfBlocks,
    Pin,
    SessionHints,
    block_keys,
    hasher_names,
    policy_names,
)
from caudex._core import CacheSequence as Sequence
from caudex.cache.block_trace import BlockTrace
from caudex.cache.clairvoyant import ClairvoyantBound, clairvoyant
from caudex.cache.hit_curve import HitCurve, hit_curve, hit_curves
from caudex.cache.policy import Policy
from caudex.cache.prefix_cache import PrefixCache
from caudex.cache.replay import ReplayResult, ReplaySettings, replay
from caudex.cache.token_trace import TokenTrace
from caudex.cache.trace_builder import TraceBuilder

__all__ = [
    "BlockCopy",
    "BlockTrace",
    "CacheStats",
    "ClairvoyantBound",
    "EndedRequest",
    "Explanation",
    "HitCurve",
    "Match",
    "Occupancy",
    "OutOfBlocks",
    "Pin",
    "Policy",
    "PrefixCache",
    "ReplayResult",
    "ReplaySettings",
    "Sequence",
    "SessionHints",
    "TokenTrace",
    "TraceBuilder",
    "block_keys",
    "clairvoyant",
    "hasher_names",
    "hit_curve",
    "hit_curves",
    "policy_names",
    "replay",
]
