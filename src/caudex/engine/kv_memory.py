"""The KV pool as whoever moves blocks in and out of it sees it."""

from __future__ import annotations

from typing import Protocol


class KvMemory(Protocol):
    """Blocks of KV as bytes, all layers of a block together. Only the engine's thread may call it."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    @property
    def kv_format(self) -> str:
        """What a block's bytes mean, and what their bits depend on besides weights, adapter and tokens."""

    def export_block(self, block: int) -> bytes:
        """A block's bytes; the same to any pool of this `kv_format`."""

    def import_block(self, block: int, data: bytes) -> None:
        """Put what `export_block` gave into a block."""
