"""Blocks in this process's memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from caudex.tiers.store import BlockKey


class MemoryStore:
    """Records in a dictionary, the least recently used first to go. Every operation is O(1) a key.

    Good for: pools on a device with less memory than the host. Not for: a pool in host memory already, whose own size
    is the better place for those bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.name = "memory"
        self._max_bytes = max_bytes
        self._records: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def count_prefix(self, keys: Sequence[BlockKey]) -> int:
        with self._lock:
            count = next((place for place, key in enumerate(keys) if key not in self._records), len(keys))
            for key in reversed(keys[:count]):
                self._records.move_to_end(key)
        return count

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        with self._lock:
            return [self._records.get(key) for key in keys]

    def put_many(self, records: Sequence[tuple[BlockKey, bytes]]) -> None:
        with self._lock:
            for key, record in reversed(records):
                self._num_bytes += len(record) - len(self._records.pop(key, b""))
                self._records[key] = record
            while self._num_bytes > self._max_bytes:
                _, record = self._records.popitem(last=False)
                self._num_bytes -= len(record)

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._num_bytes = 0
