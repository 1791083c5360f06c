"""A policy written in Python runs where a built-in one does, and its mistakes stay its own."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from typing import Any

import pytest
from tests.cache.engine_double import MiniEngine

from caudex.cache import EndedRequest, OutOfBlocks, Policy, PrefixCache


class PythonLru(Policy):
    """The built-in LRU once more: a list of unpinned nodes, the oldest first."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.ends: list[int] = []

    def end_request(self, request: EndedRequest, path: list[int]) -> None:
        self.ends = [self.nodes.end(node) for node in path]

    def offer(self, node: int) -> None:
        if node not in self.order:
            self.order.append(node)

    def withdraw(self, node: int) -> None:
        if node in self.order:
            self.order.remove(node)

    def split(self, upper: int, lower: int) -> None:
        if lower in self.order:
            self.order.insert(self.order.index(lower) + 1, upper)

    def merge(self, upper: int, lower: int) -> bool:
        return lower in self.order and self.order[self.order.index(lower) + 1 :][:1] == [upper]

    def victim(self) -> int:
        return self.order[0]


def live(cache: PrefixCache, seed: int) -> list[int]:
    """A random life; the hits of its requests."""
    rng = random.Random(seed)
    engine = MiniEngine(cache)
    running: list[Any] = []
    hits = []
    for _ in range(200):
        prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 16)))
        seq = cache.begin(prompt)
        hits.append(seq.num_cached_tokens)
        try:
            engine.compute(seq, prompt)
        except OutOfBlocks:
            seq.release()
            continue
        running.append(seq)
        if len(running) > 2:
            running.pop(rng.randrange(3)).release()
        cache.check_invariants()
    return hits


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_lru_in_python_evicts_like_the_built_in_one(index: Any) -> None:
    for seed in range(4):
        built_in = PrefixCache(20, block_size=2, index=index, policy="lru")
        python = PrefixCache(20, block_size=2, index=index, policy=PythonLru())
        assert live(python, seed) == live(built_in, seed)
        assert python.stats().evicted_blocks == built_in.stats().evicted_blocks > 0


class Broken(PythonLru):
    def victim(self) -> int:
        return self.answer()

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def raise_error() -> int:
    raise KeyError("a bug")


@pytest.mark.parametrize("answer", [raise_error, lambda: 0, lambda: 10**6, lambda: "x", lambda: None, lambda: -1])
def test_a_broken_policy_does_not_break_the_cache(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(str(args.exc_value)))
    cache = PrefixCache(20, block_size=2, policy=Broken(answer))
    assert live(cache, 1) == live(PrefixCache(20, block_size=2, policy="lru"), 1)
    assert reported


def test_a_policy_may_not_call_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(str(args.exc_value)))
    cache = PrefixCache(4, block_size=2, policy=Broken(lambda: cache.num_free_blocks))
    engine = MiniEngine(cache)
    for i in range(4):
        engine.serve(range(10 * i, 10 * i + 4))
    assert "must not call the cache" in reported[0]


def test_a_path_comes_leaf_first() -> None:
    policy = PythonLru()
    engine = MiniEngine(PrefixCache(8, block_size=2, policy=policy))
    engine.serve(range(6))
    engine.serve([*range(4), 70, 71, 72])
    assert policy.ends == [7, 4]


def test_a_policy_that_knows_its_cache_is_collected_with_it() -> None:
    policy = PythonLru()
    policy.cache = cache = PrefixCache(4, policy=policy)  # type: ignore[attr-defined]
    gone = weakref.ref(policy)
    del policy, cache
    gc.collect()
    assert gone() is None


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="six verbs"):
        PrefixCache(4, policy=object())  # type: ignore[arg-type]


def test_nodes_do_not_outlive_their_cache() -> None:
    policy = PythonLru()
    cache = PrefixCache(4, block_size=2, policy=policy)
    MiniEngine(cache).serve([1, 2, 3])
    nodes = policy.nodes
    with pytest.raises(IndexError):
        nodes.is_leaf(10**6)
    del cache
    with pytest.raises(RuntimeError, match="gone"):
        nodes.is_leaf(1)
