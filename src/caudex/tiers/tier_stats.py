"""What a tier has done since the start, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierStats:
    """Counters of one tier. Blocks are counts, times seconds.

    Attributes:
        name: the store's.
        hits: blocks given.
        misses: blocks asked for that were not there, damaged ones included.
        corrupt: blocks whose record was not what it should be.
        skipped: blocks not asked for, as computing was expected to be quicker.
        written, dropped: blocks stored; blocks not stored because the queue was full or the store failed.
        read_bytes, written_bytes, read_seconds, write_seconds: of blocks given and stored.
        read_errors, write_errors: calls in which the store failed.
    """

    name: str
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    skipped: int = 0
    written: int = 0
    dropped: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    read_errors: int = 0
    write_errors: int = 0
