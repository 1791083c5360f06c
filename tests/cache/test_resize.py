"""A pool that changes its size, or closes its gaps, while requests run: the KV follows its tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.cache.engine_double import MiniEngine

from caudex.cache import OutOfBlocks, PrefixCache


def test_shrinking_keeps_what_is_pinned_and_moves_its_kv() -> None:
    cache = PrefixCache(16, block_size=4)
    engine = MiniEngine(cache)
    for i in range(3):
        engine.serve([i, 1, 2, 3, 4, 5, 6, 7])
    prompt = tuple(range(50, 62))
    seq = cache.begin(prompt)
    engine.compute(seq, prompt)
    assert max(seq.block_table) >= 6
    engine.execute(cache.resize(5))
    cache.check_invariants()
    assert (cache.num_blocks, cache.num_pinned_blocks, cache.num_cached_blocks) == (5, 3, 2)
    assert max(seq.block_table) < 5
    engine.verify(seq, prompt)
    with pytest.raises(OutOfBlocks, match="3 are pinned"):
        cache.resize(2)
    seq.release()
    cache.check_invariants()


def test_a_grown_pool_takes_what_did_not_fit() -> None:
    cache = PrefixCache(2, block_size=4)
    seq = cache.begin(range(16))
    with pytest.raises(OutOfBlocks):
        seq.allocate(16)
    assert cache.resize(4) == []
    seq.allocate(16)
    assert sorted(seq.block_table) == [0, 1, 2, 3]


def test_compacting_leaves_the_free_blocks_at_the_end() -> None:
    cache = PrefixCache(12, block_size=4)
    engine = MiniEngine(cache)
    first, second = tuple(range(12)), tuple(range(100, 112))
    one, two = cache.begin(first), cache.begin(second)
    one.allocate(12)
    engine.compute(two, second)
    one.release()
    assert min(two.block_table) == 3
    engine.execute(cache.compact())
    cache.check_invariants()
    assert sorted(two.block_table) == [0, 1, 2]
    engine.verify(two, second)
    fresh = cache.begin(tuple(range(200, 236)))
    fresh.allocate(36)
    assert sorted(fresh.block_table) == list(range(3, 12))


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("seed", range(5))
def test_contents_follow_through_a_random_life(index: Any, seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(24, block_size=4, index=index)
    engine = MiniEngine(cache)
    live: list[tuple[Any, tuple[int, ...]]] = []
    for _ in range(300):
        match rng.randrange(6):
            case 0 | 1 if len(live) < 4:
                prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 20)))
                seq = cache.begin(prompt)
                try:
                    engine.compute(seq, prompt)
                except OutOfBlocks:
                    seq.release()
                else:
                    live.append((seq, prompt))
            case 2 if live:
                live.pop(rng.randrange(len(live)))[0].release()
            case 3:
                size = rng.randrange(max(cache.num_pinned_blocks, 4), 40)
                engine.execute(cache.resize(size))
            case 4:
                engine.execute(cache.compact())
            case 5 if live:
                parent, prompt = rng.choice(live)
                try:
                    child = parent.fork()
                except OutOfBlocks:
                    continue
                engine.execute(child.allocate(0))
                live.append((child, prompt))
        cache.check_invariants()
        for seq, prompt in live:
            engine.verify(seq, prompt)
