"""A store with what makes it safe to use: checked records, a thread that writes, pauses after failures, estimates."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from caudex.tiers.block_format import BlockFormat
from caudex.tiers.pace import Backoff, Pace
from caudex.tiers.store import BlockKey, BlockStore
from caudex.tiers.tier_stats import TierStats

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

QUEUED_BYTES = 256 << 20
"""The most that waits to be written; what comes then is dropped, and stored when it is next computed."""

BATCH_BYTES = 4 << 20
"""Records are read and written in batches of about this size: large for a store, and short enough to stop between."""

_KNOWN_KEYS = 1 << 17


@dataclass(frozen=True, slots=True)
class _Write:
    """Some blocks of a sequence, by their places among its keys."""

    scope: bytes
    keys: Sequence[BlockKey]
    blocks: Mapping[int, bytes]


class Tier:
    """One store, for blocks of one format. Whatever goes wrong in the store is a miss, a count, and one warning.

    `count_prefix` and `read` are for one thread, which waits for the store; `lacks` and `offer` for another one, which
    does not: blocks go into a bounded queue that a thread of the tier's own empties.

    The tier remembers which keys it was given, and learns by every look-up which of them the store has since lost, so
    that what is there is not written again and what is gone is.
    """

    def __init__(self, store: BlockStore, block_format: BlockFormat, queued_bytes: int = QUEUED_BYTES) -> None:
        self.stats = TierStats(store.name)
        self.blocks_a_batch = max(1, BATCH_BYTES // block_format.record_bytes)
        self._store = store
        self._format = block_format
        self._latency = Pace()
        self._transfer = Pace()
        self._reading, self._writing = Backoff(), Backoff()
        self._known: OrderedDict[BlockKey, None] = OrderedDict()
        self._lock = threading.Lock()
        self._room = queued_bytes // block_format.num_bytes
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name=f"caudex-tier-{store.name}", daemon=True)
        self._writer.start()

    @property
    def is_readable(self) -> bool:
        """Whether the store is to be asked: it is not in a pause after a failure."""
        return not self._reading.is_pausing(time.monotonic())

    def seconds_to_fetch(self, num_blocks: int) -> float:
        """What a look-up and reading so many blocks should take, from what they took before."""
        return self._latency.seconds(1) + self._transfer.seconds(num_blocks * self._format.record_bytes)

    def count_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first keys the store has; 0 if it fails."""
        started = time.perf_counter()
        found = self._read_by(lambda: self._store.count_prefix(keys))
        if found is None:
            return 0
        self._latency.observe(1, time.perf_counter() - started)
        self._remember(keys[:found])
        self._forget(keys[found:])
        self.stats.misses += len(keys) - found
        return found

    def read(self, scope: bytes, keys: Sequence[BlockKey]) -> list[bytes]:
        """The blocks of the first keys, up to the first that is gone or not what it should be."""
        started = time.perf_counter()
        records = self._read_by(lambda: self._store.get_many(keys))
        if records is None:
            return []
        blocks = list[bytes]()
        for key, record in zip(keys, records, strict=False):
            block = None if record is None else self._format.decode(scope, key, record)
            if block is None:
                self.stats.corrupt += record is not None
                break
            blocks.append(block)
        self._note_read(len(blocks), len(keys), time.perf_counter() - started)
        self._forget(keys[len(blocks) :])
        return blocks

    def lacks(self, key: BlockKey) -> bool:
        """Whether the store is not known to have this block, and can be given it."""
        with self._lock:
            return key not in self._known and not self._writing.is_pausing(time.monotonic())

    def offer(self, scope: bytes, keys: Sequence[BlockKey], blocks: Mapping[int, bytes]) -> None:
        """Have blocks of a sequence stored soon, or dropped if too many wait. Never waits.

        Args:
            scope: of the keys.
            keys: of the sequence's first blocks; it must not change any more.
            blocks: bytes of some of them by their places among the keys, in ascending order.
        """
        with self._lock:
            if self._room < len(blocks):
                self.stats.dropped += len(blocks)
                return
            self._room -= len(blocks)
        self._remember([keys[place] for place in blocks])
        self._queue.put(_Write(scope, keys, blocks))

    def close(self, timeout: float) -> None:
        """Store what waits, for at most `timeout` seconds, and let go of the store."""
        self._queue.put(None)
        self._writer.join(timeout)
        if self._writer.is_alive():
            _log.warning("KV tier %s: gave up on storing the last blocks after %.0f s", self._store.name, timeout)
        else:
            self._store.close()

    def snapshot(self) -> TierStats:
        """The counters as they are now."""
        return replace(self.stats)

    def _write_all(self) -> None:
        """What the tier's thread does."""
        while (write := self._queue.get()) is not None:
            places = list(write.blocks)
            for first in range(0, len(places), self.blocks_a_batch):
                self._write(write, places[first : first + self.blocks_a_batch])
            with self._lock:
                self._room += len(write.blocks)

    def _write(self, write: _Write, places: Sequence[int]) -> None:
        """Store a batch, and mark the blocks before it as used, since they are of use again."""
        keys = [write.keys[place] for place in places]
        started = time.perf_counter()

        def put() -> None:
            encode = self._format.encode
            blocks = [write.blocks[place] for place in places]
            self._store.put_many(
                [(key, encode(write.scope, key, block)) for key, block in zip(keys, blocks, strict=True)]
            )
            if places[0]:
                self._store.count_prefix(write.keys[: places[0]])

        if self._writing.is_pausing(time.monotonic()) or not self._is_written_by(put):
            self._forget(keys)
            self.stats.dropped += len(keys)
            return
        self.stats.written += len(keys)
        self.stats.written_bytes += len(keys) * self._format.record_bytes
        self.stats.write_seconds += time.perf_counter() - started

    def _read_by(self, call: Callable[[], _Answer]) -> _Answer | None:
        """What the store answers, or None if it fails: it is someone else's code, and no error of it leaves here."""
        try:
            answer = call()
        except Exception as error:
            self.stats.read_errors += 1
            self._note_failure(self._reading, "read", error)
            return None
        self._note_success(self._reading, "read")
        return answer

    def _is_written_by(self, call: Callable[[], None]) -> bool:
        """Whether the store did as it was told; likewise."""
        try:
            call()
        except Exception as error:
            self.stats.write_errors += 1
            self._note_failure(self._writing, "written", error)
            return False
        self._note_success(self._writing, "written")
        return True

    def _note_failure(self, backoff: Backoff, verb: str, error: Exception) -> None:
        if not backoff.has_failed:
            _log.warning("KV tier %s cannot be %s, which is tried again later: %s", self._store.name, verb, error)
        backoff.fail(time.monotonic())

    def _note_success(self, backoff: Backoff, verb: str) -> None:
        if backoff.has_failed:
            _log.warning("KV tier %s can be %s again", self._store.name, verb)
        backoff.succeed()

    def _note_read(self, num_read: int, num_asked: int, seconds: float) -> None:
        self.stats.hits += num_read
        self.stats.misses += num_asked - num_read
        self.stats.read_bytes += num_read * self._format.record_bytes
        self.stats.read_seconds += seconds
        self._transfer.observe(max(1, num_read) * self._format.record_bytes, seconds)

    def _remember(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > _KNOWN_KEYS:
                self._known.popitem(last=False)

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
