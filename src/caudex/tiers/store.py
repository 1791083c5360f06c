"""The interface of a store: bytes in, bytes out, by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

BlockKey: TypeAlias = bytes
"""32 bytes that stand for a block's tokens, all before them, and whatever else its bytes depend on."""


class BlockStore(Protocol):
    """Keeps records by key, within a bound of its own, and may lose any of them at any time.

    Reads come from one thread and writes from another, at once. Keys come in the order of a prompt's blocks, and a
    block is of no use without those before it: a store that evicts the least recently used should let go of later keys
    first.

    A store that cannot do what it is asked raises OSError, within a time that it bounds; the caller pauses and tries
    again later. What it gives back need not be what was put: records are checked by the caller.
    """

    @property
    def name(self) -> str:
        """Short, for people and metrics; says nothing secret."""

    def count_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first keys are there without a gap; counts as a use of those."""

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """The record of each key, or None."""

    def put_many(self, records: Sequence[tuple[BlockKey, bytes]]) -> None:
        """Keep records, in place of those that have these keys now."""

    def close(self) -> None:
        """Let go of files and connections. No call may follow."""
