"""The compiled prefix tree against a plain twin: one recency-ordered dictionary of keys a worker."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from caudex import _core

NUM_WORKERS = 4
DEFAULT_CAPACITY = 12


class Twin:
    """What each worker was sent, least recently sent first; within one prompt the end is older than the beginning."""

    def __init__(self) -> None:
        self.held: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(NUM_WORKERS)]
        self.capacity = [DEFAULT_CAPACITY] * NUM_WORKERS

    def insert(self, worker: int, keys: list[int], now: float) -> None:
        held = self.held[worker]
        for key in reversed(keys[: self.capacity[worker]]):
            held[key] = now
            held.move_to_end(key)
        self.trim(worker)

    def trim(self, worker: int) -> None:
        while len(self.held[worker]) > self.capacity[worker]:
            self.held[worker].popitem(last=False)

    def expire(self, worker: int, time: float) -> None:
        held = self.held[worker]
        while held and next(iter(held.values())) < time:
            held.popitem(last=False)

    def match(self, keys: list[int]) -> list[int]:
        return [next((i for i, key in enumerate(keys) if key not in held), len(keys)) for held in self.held]


prompts = st.lists(st.integers(0, 2), max_size=16)
workers = st.integers(0, NUM_WORKERS - 1)


def keys_of(prompt: list[int]) -> np.ndarray:
    return _core.chain_tokens(_core.root_key(b"ns"), np.array(prompt, dtype=np.int32), 1)


class TreeMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.tree = _core.PrefixTree(DEFAULT_CAPACITY)
        self.twin = Twin()
        self.now = 0.0

    @rule(worker=workers, prompt=prompts, wait=st.sampled_from([0.0, 1.0]))
    def insert(self, worker: int, prompt: list[int], wait: float) -> None:
        self.now += wait
        keys = keys_of(prompt)
        self.tree.insert(worker, keys, self.now)
        self.twin.insert(worker, keys.tolist(), self.now)

    @rule(prompt=prompts)
    def match(self, prompt: list[int]) -> None:
        keys = keys_of(prompt)
        assert self.tree.match(keys, NUM_WORKERS).tolist() == self.twin.match(keys.tolist())

    @rule(worker=workers, age=st.integers(0, 5))
    def expire(self, worker: int, age: int) -> None:
        self.tree.expire(worker, self.now - age)
        self.twin.expire(worker, self.now - age)

    @rule(age=st.integers(0, 5))
    def expire_all(self, age: int) -> None:
        self.tree.expire_all(self.now - age)
        for worker in range(NUM_WORKERS):
            self.twin.expire(worker, self.now - age)

    @rule(worker=workers, capacity=st.integers(1, 20))
    def set_capacity(self, worker: int, capacity: int) -> None:
        self.tree.set_capacity(worker, capacity)
        self.twin.capacity[worker] = capacity
        self.twin.trim(worker)

    @rule(worker=workers)
    def forget(self, worker: int) -> None:
        self.tree.forget(worker)
        self.twin.held[worker].clear()

    @rule()
    def snapshot_and_load(self) -> None:
        loaded = _core.PrefixTree(DEFAULT_CAPACITY)
        for worker, capacity in enumerate(self.twin.capacity):
            loaded.set_capacity(worker, capacity)
        loaded.load(self.tree.dump())
        assert loaded.held(NUM_WORKERS).tolist() == self.tree.held(NUM_WORKERS).tolist()
        loaded.check_invariants()

    @invariant()
    def agrees(self) -> None:
        self.tree.check_invariants()
        assert self.tree.held(NUM_WORKERS).tolist() == [len(held) for held in self.twin.held]
        distinct = len(set().union(*self.twin.held))
        assert self.tree.num_nodes <= distinct


TreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTreeAgainstTwin = TreeMachine.TestCase


def test_memory_is_bounded_by_what_the_workers_hold() -> None:
    tree = _core.PrefixTree(1_000)
    rng = np.random.default_rng(0)

    def send(num_prompts: int) -> int:
        for i in range(num_prompts):
            tree.insert(i % 3, keys_of(rng.integers(0, 1 << 20, 50).tolist()), float(i))
        return tree.num_bytes

    after_filling = send(1_000)
    assert send(5_000) <= 2 * after_filling
    assert tree.held(3).tolist() == [1_000, 1_000, 1_000]


def test_a_conversation_resent_stays_one_node() -> None:
    tree = _core.PrefixTree(10_000)
    prompt = list(range(10))
    for turn in range(50):
        prompt = [*prompt, 100 + turn]
        tree.insert(0, keys_of(prompt), float(turn))
    assert tree.num_nodes == 1


def test_a_whole_long_prompt_counts() -> None:
    tree = _core.PrefixTree(100_000)
    keys = keys_of(list(range(20_000)))
    tree.insert(1, keys, 0.0)
    assert tree.match(keys, 2).tolist() == [0, 20_000]


@pytest.mark.parametrize("cut", [0, 3, 5, -1])
def test_a_broken_snapshot_is_refused_whole(cut: int) -> None:
    tree = _core.PrefixTree(100)
    tree.insert(0, keys_of([1, 2, 3]), 1.0)
    other = _core.PrefixTree(100)
    other.insert(0, keys_of([7, 7]), 1.0)
    with pytest.raises(ValueError, match="snapshot"):
        other.load(tree.dump()[:cut])
    assert other.match(keys_of([7, 7]), 1).tolist() == [2]


def test_hostile_arguments_are_exceptions() -> None:
    tree = _core.PrefixTree(100)
    with pytest.raises(ValueError, match="-1"):
        tree.insert(-1, keys_of([1]), 0.0)
    with pytest.raises(ValueError, match="chunk size"):
        _core.chain_bytes(1, b"abc", 0)
    with pytest.raises(TypeError):
        _core.chain_bytes(1, "text", 64)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        tree.match(np.zeros((3, 3), dtype=np.uint64), 1)
