"""Several tiers, asked in order, when asking is quicker than computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from caudex.tiers.block_format import BlockFormat
from caudex.tiers.pace import Pace
from caudex.tiers.store import BlockKey
from caudex.tiers.tier import Tier
from caudex.tiers.tier_stats import TierStats

_SECONDS_BETWEEN_MEASUREMENTS = 10.0


DEFAULT_HELD_BYTES = 1 << 30


class HeldBlock:
    """A fetched block's bytes, for as long as someone means to use them."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class TierStack:
    """Finds the longest stored continuation of a prefix, nearest tier first.

    The rule: a tier is asked for n blocks if a look-up in it and reading n blocks should take no longer than computing
    their tokens, by running means of what either took before. What was never measured is tried. A tier that was skipped
    is measured again every ten seconds (`measure`), so that it is asked once it is quick again.

        keys     |<- in the pool ->|<--- tier 1 --->|<--- tier 2 --->|<- to compute ->|
                 0               start                                             len(keys)

    Each tier goes on where the one before it ended. Blocks that another request fetched and still holds are not fetched
    again; with `held_bytes` of them held, no more are fetched. Costs one look-up a tier and one read a batch of 4 MiB.
    """

    def __init__(self, tiers: Sequence[Tier], block_format: BlockFormat, held_bytes: int = DEFAULT_HELD_BYTES) -> None:
        self._tiers = tiers
        self._format = block_format
        self._held_bytes = held_bytes
        self._computing = Pace()
        self._held: WeakValueDictionary[BlockKey, HeldBlock] = WeakValueDictionary()
        self._next_measurement = 0.0

    @property
    def num_held_bytes(self) -> int:
        """Bytes of the blocks that were fetched and are still held."""
        return len(self._held) * self._format.num_bytes

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Tell how long computing prompt tokens took."""
        self._computing.observe(num_tokens, seconds)

    def seconds_to_compute(self, num_blocks: int) -> float:
        """What computing so many blocks' tokens should take; 0 before anything was computed."""
        return self._computing.seconds(num_blocks * self._format.num_tokens)

    def fetch(
        self,
        scope: bytes,
        keys: Sequence[BlockKey],
        start: int,
        until: float,
        take: Callable[[list[HeldBlock]], None],
    ) -> list[Tier]:
        """Fetch the blocks of `keys[start:]` that are stored, up to the first that is not, batch by batch.

        Args:
            scope: of the keys.
            keys: of all whole blocks of a prompt.
            start: how many of them are not wanted.
            until: moment of `time.monotonic` after which no batch is begun.
            take: called with each batch, in order.

        Returns:
            The tiers that were skipped because computing should be quicker.
        """
        position = start + self._take_held(keys[start:], take)
        skipped = list[Tier]()
        for tier in self._tiers:
            if position < len(keys) and time.monotonic() < until and tier.is_readable:
                if self._is_worth_asking(tier, len(keys) - position):
                    position += self._fetch_from(tier, scope, keys[position:], until, take)
                else:
                    tier.stats.skipped += len(keys) - position
                    skipped.append(tier)
        return skipped

    def measure(self, skipped: Sequence[Tier], scope: bytes, keys: Sequence[BlockKey]) -> None:
        """Read a batch of `keys` from tiers that were skipped, if that was not done for a while.

        To be called when no request waits for it.
        """
        if not skipped or time.monotonic() < self._next_measurement:
            return
        self._next_measurement = time.monotonic() + _SECONDS_BETWEEN_MEASUREMENTS
        for tier in skipped:
            found = tier.count_prefix(keys)
            if found:
                tier.read(scope, keys[: min(found, tier.blocks_a_batch)])

    def offer(self, scope: bytes, keys: Sequence[BlockKey], start: int, read: Callable[[int], bytes]) -> None:
        """Have the blocks of `keys[start:]` stored in the tiers that are not known to have them. Never waits.

        Args:
            scope: of the keys.
            keys: of a sequence's first blocks; it must not change any more.
            start: the first that may have to be stored.
            read: gives a block's bytes by its place among the keys; called at most once a block.
        """
        blocks: dict[int, bytes] = {}
        for tier in self._tiers:
            lacking = [place for place in range(start, len(keys)) if tier.lacks(keys[place])]
            for place in lacking:
                if place not in blocks:
                    blocks[place] = read(place)
            if lacking:
                tier.offer(scope, keys, {place: blocks[place] for place in lacking})

    def stats(self) -> tuple[TierStats, ...]:
        """Each tier's counters, in order."""
        return tuple(tier.snapshot() for tier in self._tiers)

    def close(self, timeout: float) -> None:
        """Store what waits to be, each tier for at most `timeout` seconds."""
        for tier in self._tiers:
            tier.close(timeout)

    def _is_worth_asking(self, tier: Tier, num_blocks: int) -> bool:
        to_compute = self.seconds_to_compute(num_blocks)
        return to_compute == 0 or tier.seconds_to_fetch(num_blocks) <= to_compute

    def _take_held(self, keys: Sequence[BlockKey], take: Callable[[list[HeldBlock]], None]) -> int:
        held = list[HeldBlock]()
        for key in keys:
            block = self._held.get(key)
            if block is None:
                break
            held.append(block)
        take(held)
        return len(held)

    def _fetch_from(
        self,
        tier: Tier,
        scope: bytes,
        keys: Sequence[BlockKey],
        until: float,
        take: Callable[[list[HeldBlock]], None],
    ) -> int:
        """How many blocks a tier gave."""
        found = tier.count_prefix(keys)
        position = 0
        while position < found and time.monotonic() < until and self.num_held_bytes < self._held_bytes:
            batch = keys[position : min(found, position + tier.blocks_a_batch)]
            blocks = [HeldBlock(data) for data in tier.read(scope, batch)]
            self._held.update(zip(batch, blocks, strict=False))
            take(blocks)
            position += len(blocks)
            if len(blocks) < len(batch):
                break
        return position
