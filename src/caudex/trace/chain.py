"""Prefix-chained block ids: one 64-bit number for a block and all that comes before it.

The hash of a prefix is the sum, modulo 2^64, of one well-mixed term for each (position, token) pair, so all prefixes of
a prompt come from one cumulative sum and the ids for any block size are strides of the same array. Two different
prefixes share an id with probability 2^-64. The ids are the same in every process, which a trace needs and a cache
must not have; they are no secret (see `caudex.trace.anonymize` for logs that leave the building).
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]

_POSITION = np.uint64(0x9E3779B97F4A7C15)
_TOKEN = np.uint64(0xD1342543DE82EF95)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele, Lea and Flood's 64-bit finaliser ("Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def seed_of(*names: str) -> int:
    """A 64-bit start of a chain that no other tuple of names has: the namespace of what follows."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def prefix_hashes(ids: npt.NDArray[np.integer], seed: int = 0) -> Int64Array:
    """The hash of every prefix of `ids` (tokens or block ids): element i stands for ids[0] .. ids[i]."""
    positions = np.arange(1, len(ids) + 1, dtype=np.uint64)
    terms = mix64(mix64(positions * _POSITION) + ids.astype(np.uint64) * _TOKEN)
    return (np.cumsum(terms, dtype=np.uint64) + np.uint64(seed)).view(np.int64)


def every_block(hashes: Int64Array, block_size: int) -> Int64Array:
    """The ids of the full blocks of `block_size` tokens, from the hashes of all prefixes."""
    return hashes[block_size - 1 :: block_size]
