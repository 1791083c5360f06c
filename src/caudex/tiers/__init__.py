"""Floor 3: where KV blocks go besides the pool. Host memory, disk and shared stores behind one small interface.

A store (`BlockStore`) keeps bytes by key; it knows neither models nor tokens. A `Tier` is a store with what makes it
safe and worth asking: checked records, a thread that writes, pauses after failures, running estimates. A `TierStack`
asks several in order. The engine decides which blocks to offer and when to ask.
"""

from caudex.tiers.block_format import BlockFormat
from caudex.tiers.keys import KeyChain, fingerprint, key_scope
from caudex.tiers.stack import HeldBlock, TierStack
from caudex.tiers.store import BlockStore
from caudex.tiers.store_spec import StoreSpec, parse_store
from caudex.tiers.tier import Tier
from caudex.tiers.tier_stats import TierStats

__all__ = [
    "BlockFormat",
    "BlockStore",
    "HeldBlock",
    "KeyChain",
    "StoreSpec",
    "Tier",
    "TierStack",
    "TierStats",
    "fingerprint",
    "key_scope",
    "parse_store",
]
