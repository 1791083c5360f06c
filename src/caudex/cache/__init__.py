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
from caudex.cache.policy import Policy
from caudex.cache.prefix_cache import PrefixCache

__all__ = [
    "BlockCopy",
    "CacheStats",
    "EndedRequest",
    "Explanation",
    "Match",
    "Occupancy",
    "OutOfBlocks",
    "Pin",
    "Policy",
    "PrefixCache",
    "Sequence",
    "SessionHints",
    "block_keys",
    "hasher_names",
    "policy_names",
]
