"""Tiers and stacks of them: records, failures, estimates, isolation."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from caudex.cache import block_keys
from caudex.tiers.disk_store import DiskStore
from caudex.tiers.keys import KeyChain, fingerprint, key_scope
from caudex.tiers.memory_store import MemoryStore
from caudex.tiers.stack import HeldBlock, TierStack
from caudex.tiers.store import BlockKey, BlockStore
from caudex.tiers.store_spec import parse_store
from caudex.tiers.tier import Tier
from caudex.tiers.valkey_store import ValkeyStore

from .conftest import FORMAT, ValkeyServer, a_block, a_key

SCOPE, OTHER_SCOPE = b"s" * 32, b"o" * 32
KEYS = [a_key(number) for number in range(40)]
BLOCKS = [a_block(number) for number in range(40)]
FAR_OFF = 1e12


class SlowStore(MemoryStore):
    """Host memory with a delay before every answer, and a switch that makes it fail."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__(2**24)
        self.delay = delay
        self.fails = False
        self.num_asked = 0

    def count_prefix(self, keys: Sequence[BlockKey]) -> int:
        self._answer()
        return super().count_prefix(keys)

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        self._answer()
        return super().get_many(keys)

    def put_many(self, records: Sequence[tuple[BlockKey, bytes]]) -> None:
        self._answer()
        super().put_many(records)

    def _answer(self) -> None:
        self.num_asked += 1
        time.sleep(self.delay)
        if self.fails:
            raise OSError("the store is gone")


def fill(store: BlockStore, numbers: range, scope: bytes = SCOPE) -> None:
    store.put_many([(KEYS[number], FORMAT.encode(scope, KEYS[number], BLOCKS[number])) for number in numbers])


def blocks_at(places: range) -> dict[int, bytes]:
    return {place: BLOCKS[place] for place in places}


def fetched(stack: TierStack, start: int = 0, scope: bytes = SCOPE, until: float = FAR_OFF) -> list[bytes]:
    blocks = list[HeldBlock]()
    stack.fetch(scope, KEYS, start, until, blocks.extend)
    return [block.data for block in blocks]


def test_a_record_is_read_as_it_was_asked_for_or_not_at_all() -> None:
    record = FORMAT.encode(SCOPE, KEYS[1], BLOCKS[1])
    assert len(record) == FORMAT.record_bytes
    assert FORMAT.decode(SCOPE, KEYS[1], record) == BLOCKS[1]
    assert FORMAT.decode(OTHER_SCOPE, KEYS[1], record) is None
    assert FORMAT.decode(SCOPE, KEYS[2], record) is None
    for place in (0, 5, 9, 15, 30, 60, 90, 110, 200, len(record) - 1):
        garbled = bytearray(record)
        garbled[place] ^= 1
        assert FORMAT.decode(SCOPE, KEYS[1], bytes(garbled)) is None, place


def test_keys_are_the_caches_own_and_grow_with_the_sequence() -> None:
    tokens = np.arange(100, dtype=np.int32)
    chain = KeyChain(SCOPE, 16)
    for end in (5, 16, 50, 100):
        chain.extend(tokens[chain.num_tokens : end])
    assert chain.keys == block_keys(tokens, 16, hash="sha256", namespace=SCOPE.hex())
    assert len(chain.keys) == 6
    with pytest.raises(ValueError, match="32 bytes; parent has 3"):
        block_keys(tokens, 16, parent=b"abc")


def test_whoever_may_not_share_has_other_keys() -> None:
    parts = {"namespace": "a", "adapter": "b", "tenant": "c"}
    scopes = {
        key_scope(model, **{**parts, **change})
        for model in (b"1" * 32, b"2" * 32)
        for change in ({}, {"namespace": "b"}, {"namespace": "b", "adapter": "a"}, {"adapter": ""}, {"tenant": "ab"})
    }
    assert len(scopes) == 10
    assert fingerprint({"a": "bc", "d": ""}) != fingerprint({"a": "b", "cd": ""})
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})


def test_one_tier_goes_on_where_another_ends() -> None:
    near, far = MemoryStore(2**24), MemoryStore(2**24)
    fill(near, range(5, 9))
    fill(far, range(3, 30))
    tiers = [Tier(near, FORMAT), Tier(far, FORMAT)]
    stack = TierStack(tiers, FORMAT)
    assert fetched(stack, start=5) == BLOCKS[5:30]
    assert [tier.stats.hits for tier in tiers] == [4, 21]
    assert fetched(stack, start=3) == BLOCKS[3:30]
    assert fetched(stack, start=0) == []
    assert fetched(stack, start=5, scope=OTHER_SCOPE) == []
    assert tiers[0].stats.corrupt == 1


def test_what_is_held_is_not_fetched_again() -> None:
    store = SlowStore()
    fill(store, range(10))
    stack = TierStack([Tier(store, FORMAT)], FORMAT)
    blocks = list[HeldBlock]()
    stack.fetch(SCOPE, KEYS[:10], 0, FAR_OFF, blocks.extend)
    num_asked = store.num_asked
    assert stack.num_held_bytes == 10 * FORMAT.num_bytes
    again = list[HeldBlock]()
    stack.fetch(SCOPE, KEYS[:10], 0, FAR_OFF, again.extend)
    assert again == blocks
    assert store.num_asked == num_asked
    del blocks, again
    assert stack.num_held_bytes == 0


def test_blocks_are_written_once_and_again_when_they_are_gone(tmp_path: Path) -> None:
    tier = Tier(DiskStore(tmp_path, 2**24), FORMAT)
    tier.offer(SCOPE, KEYS[:8], blocks_at(range(3, 8)))
    assert [tier.lacks(key) for key in KEYS[:9]] == [True] * 3 + [False] * 5 + [True]
    tier.close(10)
    assert (tier.stats.written, tier.stats.dropped) == (5, 0)
    tier = Tier(DiskStore(tmp_path, 2**24), FORMAT)
    assert tier.count_prefix(KEYS[3:]) == 5
    assert [tier.lacks(key) for key in KEYS[:9]] == [True] * 3 + [False] * 5 + [True]
    for file in tmp_path.glob("??/*.kv"):
        file.unlink()
    assert tier.count_prefix(KEYS[3:]) == 0
    assert all(tier.lacks(key) for key in KEYS)
    tier.close(10)


def test_what_there_is_no_room_for_is_dropped() -> None:
    store = SlowStore(delay=0.2)
    tier = Tier(store, FORMAT, queued_bytes=10 * FORMAT.num_bytes)
    for start in range(0, 40, 10):
        tier.offer(SCOPE, KEYS[: start + 10], blocks_at(range(start, start + 10)))
    tier.close(10)
    assert tier.stats.written == 10
    assert tier.stats.dropped == 30
    assert not tier.lacks(KEYS[0])
    assert tier.lacks(KEYS[39])


def test_a_store_that_fails_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    store = SlowStore()
    fill(store, range(10))
    tier = Tier(store, FORMAT)
    stack = TierStack([tier], FORMAT)
    store.fails = True
    with caplog.at_level(logging.WARNING):
        assert fetched(stack) == []
        num_asked = store.num_asked
        assert fetched(stack) == []
        assert store.num_asked == num_asked
        assert not tier.is_readable
        time.sleep(0.3)
        assert fetched(stack) == []
        assert tier.stats.read_errors == 2
        store.fails = False
        time.sleep(0.6)
        assert fetched(stack) == BLOCKS[:10]
    assert [record.message for record in caplog.records] == [
        "KV tier memory cannot be read, which is tried again later: the store is gone",
        "KV tier memory can be read again",
    ]


def test_a_store_that_cannot_be_written_to_is_still_read() -> None:
    store = SlowStore()
    fill(store, range(4))
    tier = Tier(store, FORMAT)
    store.fails = True
    tier.offer(SCOPE, KEYS[:10], blocks_at(range(4, 10)))
    while not tier.stats.dropped:
        time.sleep(0.01)
    assert not tier.lacks(KEYS[20]), "what cannot be written is not offered"
    store.fails = False
    assert fetched(TierStack([tier], FORMAT)) == BLOCKS[:4]


def test_a_slow_tier_is_skipped_when_computing_is_quicker_and_comes_back() -> None:
    slow, quick = SlowStore(delay=0.05), MemoryStore(2**24)
    fill(slow, range(10))
    fill(quick, range(4))
    tiers = [Tier(slow, FORMAT), Tier(quick, FORMAT)]
    stack = TierStack(tiers, FORMAT)
    assert fetched(stack) == BLOCKS[:10], "what was never measured is tried"
    for _ in range(20):
        stack.note_computed(1000, 0.05)
    num_asked = slow.num_asked
    skipped = stack.fetch(SCOPE, KEYS, 0, FAR_OFF, lambda blocks: None)
    assert skipped == [tiers[0]]
    assert slow.num_asked == num_asked
    assert tiers[0].stats.skipped == len(KEYS)
    assert fetched(stack) == BLOCKS[:4]
    slow.delay = 0.0
    for _ in range(40):
        stack._next_measurement = 0.0
        stack.measure(skipped, SCOPE, KEYS)
    assert fetched(stack) == BLOCKS[:10]


def test_a_fetch_ends_in_time_with_what_it_has() -> None:
    store = SlowStore(delay=0.1)
    fill(store, range(40))
    tier = Tier(store, FORMAT)
    tier.blocks_a_batch = 4
    blocks = fetched(TierStack([tier], FORMAT), until=time.monotonic() + 0.35)
    assert blocks == BLOCKS[: len(blocks)]
    assert 4 <= len(blocks) < 40


def test_damage_in_valkey_is_a_miss_that_is_mended(valkey: ValkeyServer) -> None:
    import redis

    fill(ValkeyStore(valkey.url), range(10))
    client, name = redis.Redis(port=valkey.port), b"caudex:kv:" + KEYS[6]
    client.setrange(name, 1000, b"rubbish")
    tier = Tier(ValkeyStore(valkey.url), FORMAT)
    stack = TierStack([tier], FORMAT)
    assert fetched(stack) == BLOCKS[:6]
    assert tier.stats.corrupt == 1
    assert tier.lacks(KEYS[6])
    tier.offer(SCOPE, KEYS[:7], blocks_at(range(6, 7)))
    tier.close(10)
    assert fetched(TierStack([Tier(ValkeyStore(valkey.url), FORMAT)], FORMAT)) == BLOCKS[:10]


def test_valkey_killed_in_the_middle_of_reads_and_writes(valkey: ValkeyServer) -> None:
    tier = Tier(ValkeyStore(valkey.url, timeout=0.3), FORMAT)
    tier.blocks_a_batch = 1
    stack = TierStack([tier], FORMAT)
    fill(ValkeyStore(valkey.url), range(40))
    killer = threading.Timer(0.05, valkey.kill)
    killer.start()
    num_offered = 0
    while not tier.stats.read_errors:
        blocks = fetched(stack)
        assert blocks == BLOCKS[: len(blocks)]
        tier.offer(SCOPE, KEYS[:5], blocks_at(range(5)))
        num_offered += 5
    killer.join()
    while tier.stats.written + tier.stats.dropped < num_offered:
        time.sleep(0.01)
    valkey.start()
    while not tier.is_readable:
        time.sleep(0.01)
    stack = TierStack([tier], FORMAT)  # Which holds nothing of what the first one has fetched.
    assert fetched(stack) == [], "a server without a disk comes back empty"
    fill(ValkeyStore(valkey.url), range(40))
    assert fetched(stack) == BLOCKS
    tier.close(10)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("disk", "'disk' is no KV tier; expected disk:PATH"),
        ("disk:", "'disk:' is no KV tier"),
        ("disk:/a,size=big", "the size 'big' in the KV tier 'disk:/a,size=big' is no size; write 512M, or 20GiB"),
        ("disk:/a,sise=1G", "'sise=1G' in the KV tier 'disk:/a,sise=1G' is no setting of it"),
        ("memory:size=1G", "'memory:size=1G' is no KV tier"),
        ("memory,size=0", "the size '0'"),
        ("valkey://", "'valkey://' is no KV tier"),
        ("valkey://host:port", "'valkey://host:port' is no KV tier"),
        ("valkey://host,ttl=soon", "the ttl 'soon' in the KV tier .* is no number of seconds, such as 3600"),
        ("http://host", "'http://host' is no KV tier"),
    ],
)
def test_what_names_no_store_is_told(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_store(text)


def test_what_names_a_store_opens_it(tmp_path: Path) -> None:
    assert isinstance(parse_store("memory,size=1M").open(), MemoryStore)
    assert isinstance(parse_store("memory:").open(), MemoryStore)
    store = parse_store(f"disk:{tmp_path}/kv,size=20GB").open()
    assert store.name == f"disk:{tmp_path}/kv"
    store = parse_store("valkeys://someone:password@host:7000/2,ttl=60").open()
    assert store.name == "valkey:host:7000"
