"""KV events: the wire format, and an index that follows two workers which hash with seeds of their own."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.routing import Fleet, token_request
from caudex.routing.event_index import EventIndex
from caudex.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, decode_batch
from caudex.routing.prefix_exact import PrefixExactPolicy

BLOCK = 4


class Engine:
    """A worker's cache of blocks, publishing batches as vLLM does; its hashes are seeded."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.blocks: dict[int, tuple[int, ...]] = {}

    def store(self, tokens: list[int], salt: str = "") -> bytes | None:
        parent, new = None, []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            block_hash = hash((self.seed, salt, tuple(tokens[:end])))
            if block_hash not in self.blocks:
                new.append((block_hash, parent, tokens[end - BLOCK : end]))
                self.blocks[block_hash] = tuple(tokens[:end])
            parent = block_hash
        if not new:
            return None
        event = {
            "type": "BlockStored",
            "block_hashes": [h & (2**64 - 1) for h, _, _ in new],
            "parent_block_hash": None if new[0][1] is None else new[0][1] & (2**64 - 1),
            "token_ids": [t for _, _, block in new for t in block],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [(salt,) if salt and new[0][1] is None else None] + [None] * (len(new) - 1),
        }
        return msgspec.msgpack.encode([1.0, [event], 0])

    def remove(self, rng: random.Random) -> bytes:
        """Evicts a block that is no other's parent."""
        prefixes = set(self.blocks.values())
        leaves = [h for h, p in self.blocks.items() if not any(q[:-BLOCK] == p for q in prefixes)]
        gone = rng.choice(sorted(leaves))
        del self.blocks[gone]
        event = {"type": "BlockRemoved", "block_hashes": [gone & (2**64 - 1)], "medium": "GPU"}
        return msgspec.msgpack.encode([1.0, [event], 0])


def matched(index: EventIndex, fleet: Fleet, tokens: list[int], salt: str = "") -> list[int]:
    request = token_request(np.array([*tokens, -1], dtype=np.int32), block_size=BLOCK, salt=salt)
    return [int(n) for n in index.cached_tokens(request, fleet)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_index_follows_each_worker_exactly(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 999)))
    engines, index, fleet = [Engine(1), Engine(2)], EventIndex(), Fleet()
    for name in "ab":
        fleet.join(name)
    prompts = data.draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8))
    for prompt in prompts:
        worker = data.draw(st.integers(0, 1))
        payload = engines[worker].store(prompt)
        if engines[worker].blocks and data.draw(st.booleans()) and payload is None:
            payload = engines[worker].remove(rng)
        for event in decode_batch(payload) if payload else []:
            index.apply(worker, event)
        for probe in prompts:
            expected = []
            for engine in engines:
                held = set(engine.blocks.values())
                run = 0
                while (run + 1) * BLOCK <= len(probe) and tuple(probe[: (run + 1) * BLOCK]) in held:
                    run += 1
                expected.append(run * BLOCK)
            assert matched(index, fleet, probe) == expected
    assert index.orphans == 0


def test_salts_restarts_and_clears() -> None:
    index, fleet = EventIndex(), Fleet()
    fleet.join("a")
    payload = Engine(1).store([1, 2, 3, 4, 5, 6, 7, 8], salt="tenant")
    assert payload is not None
    for event in decode_batch(payload):
        index.apply(0, event)
    assert matched(index, fleet, [1, 2, 3, 4], salt="tenant") == [4]
    assert matched(index, fleet, [1, 2, 3, 4]) == [0]
    index.apply(0, AllBlocksCleared())
    assert matched(index, fleet, [1, 2, 3, 4], salt="tenant") == [0]
    assert index.num_blocks(0) == 0


def test_events_of_sglang_with_their_salt_are_followed() -> None:
    """Maps as vLLM's, but for the salt, which is a field, and hashes, which may be negative."""
    index, fleet = EventIndex(), Fleet()
    fleet.join("a")
    first = {
        "type": "BlockStored",
        "block_hashes": [-5, 7],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "cache_salt": "tenant",
        "session_id": "s",
    }
    second = {**first, "block_hashes": [9], "parent_block_hash": 7, "token_ids": [9, 10, 11, 12]}
    in_host_memory = {**first, "block_hashes": [11], "token_ids": [20, 21, 22, 23], "medium": "CPU_PINNED"}
    for event in decode_batch(msgspec.msgpack.encode([0.0, [first, second, in_host_memory], None])):
        index.apply(0, event)
    tokens = list(range(1, 13))
    assert matched(index, fleet, tokens, salt="tenant") == [12]
    assert matched(index, fleet, tokens) == [0]
    for event in decode_batch(msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [7, 9]}]])):
        index.apply(0, event)
    assert matched(index, fleet, tokens, salt="tenant") == [4]


def test_a_block_below_an_unknown_parent_is_not_credited() -> None:
    index, fleet = EventIndex(), Fleet()
    fleet.join("a")
    orphan = BlocksStored(np.array([9], np.uint64), 1234, np.arange(4, dtype=np.int32), 4, "", "")
    index.apply(0, orphan)
    assert index.orphans == 1
    assert matched(index, fleet, [0, 1, 2, 3]) == [0]


def test_older_array_events_and_byte_hashes_are_read() -> None:
    digest = bytes(range(32))
    stored = ["BlockStored", [digest], None, [1, 2, 3, 4], 4, None, "GPU"]
    events = decode_batch(msgspec.msgpack.encode([0.0, [stored, ["BlockRemoved", [digest]], ["AllBlocksCleared"]]]))
    assert isinstance(events[0], BlocksStored)
    assert isinstance(events[1], BlocksRemoved)
    assert events[0].hashes[0] == events[1].hashes[0] == int.from_bytes(digest[-8:], "big")
    assert events[2] == AllBlocksCleared()


def test_blocks_in_other_memory_are_left_out() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}
    assert decode_batch(msgspec.msgpack.encode([0.0, [event], 0])) == []


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode([1, [{}]])])
def test_garbage_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode_batch(payload)


def test_the_exact_policy_sends_to_the_holder() -> None:
    fleet, policy = Fleet(), PrefixExactPolicy()
    for name in "abc":
        fleet.join(name)
    tokens = list(range(400))
    payload = Engine(3).store(tokens)
    assert payload is not None
    for event in decode_batch(payload):
        policy.events.apply(1, event)
    best = policy.rank(token_request(np.array(tokens, np.int32), block_size=BLOCK), fleet, 0.0).best
    assert best is not None
    assert (best.worker, best.cached_tokens) == (1, 399)
