"""Both indexes against the twin: same matches, same evictions, same counts, and KV contents that follow the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.cache.twin import COUNTERS, Block, Request, Tokens, Twin

from caudex.cache import BlockCopy, OutOfBlocks, Pin, PrefixCache, Sequence, SessionHints, policy_names

hints = st.builds(
    SessionHints,
    priority=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
    expected_return=st.sampled_from([-1.0, -1.0, 5.0, 30.0]),
    ends=st.sampled_from([False, False, True]),
)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
spaces = st.sampled_from(["", "", "", "other"])
CROWD = 260  # more namespaces than are remembered


@dataclass(eq=False)
class Pair:
    """A running request in the cache and in the twin."""

    seq: Sequence
    twin: Request
    awaits_copy: bool = False  # a fork, until the next allocation has returned its copy


class CacheMachine(RuleBasedStateMachine):
    """Does the same to the cache and to the twin, and plays the engine: KV of a token is the tokens up to it."""

    index: ClassVar[Literal["radix", "hash"]]
    policy: ClassVar[str]

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5))
    def make(self, num_blocks: int, block_size: int) -> None:
        budget = num_blocks // 2
        self.cache = PrefixCache(
            num_blocks, block_size, index=self.index, policy=self.policy, pin_budget=budget, manual_clock=True
        )
        self.twin = Twin(num_blocks, block_size, self.index, self.policy, self.has_gone, budget)
        self.pairs: list[Pair] = []
        self.pins: list[tuple[Pin, Request]] = []
        self.kv: dict[tuple[int, int], Any] = {}

    def has_gone(self, space: str, key: Tokens) -> bool:
        return self.cache.match([*key, 9], space).num_tokens < len(key)

    def pick(self, data: st.DataObject) -> Pair:
        return data.draw(st.sampled_from(self.pairs))

    # ------------------------------------------------------------------------------------------------- rules

    @rule(tokens=prompts, space=spaces, hints=hints, is_resumed=st.sampled_from([False, False, True]))
    def begin(self, tokens: Tokens, space: str, hints: SessionHints, is_resumed: bool) -> None:
        found = self.cache.match(list(tokens), space)
        assert found.num_tokens == self.twin.match(space, tokens)
        source: Block | None = None
        if found.partial is not None:
            block, slots = found.partial
            assert slots == found.num_tokens - found.num_whole
            source = next(b for b in self.twin.sources(space, tokens, found.num_tokens) if self.ids[b] == block)
        seq = (self.cache.resume if is_resumed else self.cache.begin)(list(tokens), space, hints=hints)
        twin = self.twin.begin(space, tokens, source, is_resumed=is_resumed)
        twin.priority, twin.expected_return, twin.ends = hints.priority, hints.expected_return, hints.ends
        self.pairs.append(Pair(seq, twin))

    @rule(tokens=prompts, space=spaces)
    def pin(self, tokens: Tokens, space: str) -> None:
        if not self.twin.may_pin(self.twin.num_to_pin(space, tokens)):
            with pytest.raises(OutOfBlocks):
                self.cache.pin(list(tokens), space)
            return
        pin, twin = self.cache.pin(list(tokens), space), self.twin.pin(space, tokens)
        assert pin.num_tokens == len(twin.tokens)
        assert pin.blocks.tolist() == [self.ids[block] for block in twin.table]
        self.pins.append((pin, twin))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin, twin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        pin.release()
        self.twin.release(twin)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.twin.now += seconds
        self.cache.set_time(self.twin.now)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), beyond=st.integers(0, 3))
    def allocate(self, data: st.DataObject, beyond: int) -> None:
        pair = self.pick(data)
        num_tokens = data.draw(st.integers(0, len(pair.twin.tokens) + beyond))
        held = len(pair.seq.block_table)
        if not self.twin.fits(self.twin.missing(pair.twin, num_tokens)):
            with pytest.raises(OutOfBlocks):
                pair.seq.allocate(num_tokens)
            return
        copies = pair.seq.allocate(num_tokens)
        self.twin.allocate(pair.twin, num_tokens)
        self.name_new_blocks(pair, held)
        self.execute(copies)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), max_size=4))
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        pair = self.pick(data)
        pair.seq.append(tokens)
        pair.twin.tokens += tuple(tokens)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        pair = self.pick(data)
        if pair.awaits_copy:
            self.execute(pair.seq.allocate(0))
        limit = min(len(pair.twin.tokens), len(pair.twin.table) * self.twin.block_size)
        num_tokens = data.draw(st.integers(0, max(limit, pair.twin.num_committed)))
        self.compute(pair, num_tokens)
        pair.seq.commit(num_tokens)
        self.twin.commit(pair.twin, num_tokens)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """One token each for a batch; all of them or none."""
        batch = data.draw(st.lists(st.sampled_from(self.pairs), unique=True, min_size=1))
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=len(batch), max_size=len(batch)))
        lengths = [len(pair.seq.block_table) for pair in batch]
        if not self.twin.fits(sum(self.twin.missing(pair.twin, len(pair.twin.tokens) + 1) for pair in batch)):
            with pytest.raises(OutOfBlocks):
                self.cache.append_and_allocate([pair.seq for pair in batch], tokens)
            return
        copies = self.cache.append_and_allocate([pair.seq for pair in batch], tokens)
        for pair, token, length in zip(batch, tokens, lengths, strict=True):
            pair.twin.tokens += (token,)
            self.twin.allocate(pair.twin, len(pair.twin.tokens))
            self.name_new_blocks(pair, length)
        self.execute(copies)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        if parent.awaits_copy:
            return  # its own last block is not there yet; the engine forks what it has computed
        if not self.twin.fits(self.twin.missing_for_fork(parent.twin)):
            with pytest.raises(OutOfBlocks):
                parent.seq.fork()
            return
        seq = parent.seq.fork()
        self.pairs.append(Pair(seq, self.twin.fork(parent.twin), awaits_copy=True))
        self.name_new_blocks(self.pairs[-1], 0)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pair = self.pick(data)
        pair.seq.release()
        self.twin.release(pair.twin)
        self.pairs.remove(pair)

    @precondition(lambda self: self.pairs)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """All that is left of a request in one go, as most requests end."""
        pair = self.pick(data)
        held = len(pair.seq.block_table)
        if not self.twin.fits(self.twin.missing(pair.twin, len(pair.twin.tokens))):
            return
        copies = pair.seq.allocate(pair.seq.num_tokens)
        self.twin.allocate(pair.twin, len(pair.twin.tokens))
        self.name_new_blocks(pair, held)
        self.execute(copies)
        self.compute(pair, pair.seq.num_tokens)
        pair.seq.commit(pair.seq.num_tokens)
        self.twin.commit(pair.twin, len(pair.twin.tokens))
        pair.seq.release()
        self.twin.release(pair.twin)
        self.pairs.remove(pair)

    @rule()
    def crowd(self) -> None:
        """Each of many namespaces asks once; then those in which nothing is left are forgotten, and may return."""
        for i in range(CROWD):
            self.cache.begin([0], f"stranger {self.twin.begun + i}").release()
        self.twin.pass_by(CROWD)
        used = {space for space, _ in self.twin.resident} | {request.space for request in self.twin.running}
        assert used <= set(self.cache.namespaces())
        assert len(self.cache.namespaces()) < CROWD

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.twin.clear()

    # ------------------------------------------------------------------------------------------------- the engine

    ids: dict[Block, int]

    def name_new_blocks(self, pair: Pair, held: int) -> None:
        """Which id the cache gave to the twin's new blocks."""
        if not hasattr(self, "ids"):
            self.ids = {}
        for block, number in zip(pair.twin.table[held:], pair.seq.block_table[held:].tolist(), strict=True):
            self.ids[block] = number

    def execute(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            for slot in range(copy.num_slots):
                self.kv[copy.dst, slot] = self.kv[copy.src, slot]
        for pair in self.pairs:
            pair.awaits_copy = False

    def compute(self, pair: Pair, num_tokens: int) -> None:
        table = pair.seq.block_table.tolist()
        for i in range(pair.seq.num_committed_tokens, num_tokens):
            place = table[i // self.twin.block_size], i % self.twin.block_size
            self.kv[place] = (pair.twin.space, pair.twin.tokens[: i + 1])

    # ------------------------------------------------------------------------------------------------- what must hold

    @invariant()
    def the_cache_agrees_with_itself(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_invariants()

    @invariant()
    def the_counts_are_the_twins(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert self.cache.num_free_blocks == self.twin.num_free
        assert self.cache.num_cached_blocks == self.twin.num_cached
        stats = self.cache.stats()
        assert {name: getattr(stats, name) for name in COUNTERS} == self.twin.stats
        assert stats.lookup_tokens == stats.hit_whole_tokens + stats.hit_partial_tokens + stats.missed_tokens

    @invariant()
    def what_is_resident_is_the_twins(self) -> None:
        if not hasattr(self, "cache"):
            return
        for space, key in self.twin.resident:
            assert self.cache.match([*key, 9], space).num_tokens == len(key)

    @invariant()
    def tables_hold_the_kv_of_their_tokens(self) -> None:
        for pair in getattr(self, "pairs", []):
            table = pair.seq.block_table.tolist()
            assert table == [self.ids[block] for block in pair.twin.table]
            assert pair.seq.num_committed_tokens == pair.twin.num_committed
            readable = pair.twin.in_tree if pair.awaits_copy or pair.twin.source else pair.twin.num_committed
            for i in range(readable):
                place = table[i // self.twin.block_size], i % self.twin.block_size
                assert self.kv[place] == (pair.twin.space, pair.twin.tokens[: i + 1])


def machine(index_: Literal["radix", "hash"], policy_: str) -> type[RuleBasedStateMachine]:
    class Machine(CacheMachine):
        index = index_
        policy = policy_

    return Machine


CASES = [(index, policy) for index in ("radix", "hash") for policy in policy_names()]


@pytest.mark.parametrize(("index", "policy"), CASES)
def test_the_cache_does_what_the_twin_does(index: Any, policy: Any) -> None:
    case = machine(index, policy)
    case.TestCase.settings = settings(
        max_examples=40 if policy in ("lru", "fifo") else 12,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case.TestCase().runTest()
