"""Records: a block's bytes with what they must be checked against before anyone uses them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from caudex.tiers.store import BlockKey

MAGIC = b"CdxK"
VERSION = 1

_HEADER = struct.Struct("<4sIIQ32s32s")
_CHECKSUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What all blocks of a pool have in common.

    A record is, little-endian,

        magic 4 | version 4 | tokens 4 | length of the KV 8 | scope 32 | key 32 | checksum 16 | KV

    The checksum is XXH3 (128 bits) of all the rest. It finds what disks, networks and torn writes do; it is no
    signature: who may write to a store may change what is answered from it.
    """

    num_tokens: int
    num_bytes: int

    @property
    def record_bytes(self) -> int:
        return _HEADER.size + _CHECKSUM_BYTES + self.num_bytes

    def encode(self, scope: bytes, key: BlockKey, block: bytes) -> bytes:
        """The record of a block's bytes."""
        header = _HEADER.pack(MAGIC, VERSION, self.num_tokens, len(block), scope, key)
        return b"".join((header, _checksum(header, block), block))

    def decode(self, scope: bytes, key: BlockKey, record: bytes) -> bytes | None:
        """The block's bytes, or None unless the record is whole, undamaged, and the one that was asked for."""
        header = _HEADER.pack(MAGIC, VERSION, self.num_tokens, self.num_bytes, scope, key)
        if len(record) != self.record_bytes or not record.startswith(header):
            return None
        start = _HEADER.size + _CHECKSUM_BYTES
        block = memoryview(record)[start:]
        return bytes(block) if record[_HEADER.size : start] == _checksum(header, block) else None


def _checksum(header: bytes, block: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(header)
    digest.update(block)
    return digest.digest()
