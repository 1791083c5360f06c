"""A saved index is the same index when it is loaded; anything else is refused whole."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from tests.cache.engine_double import MiniEngine

from caudex.cache import OutOfBlocks, PrefixCache


def live(cache: PrefixCache, seed: int, steps: int = 80) -> list[tuple[str, str, list[int]]]:
    """A random life; the prompts that were sent."""
    rng = random.Random(seed)
    prompts = []
    running: list[Any] = []
    for _ in range(steps):
        space, tenant = rng.choice(["", "lora"]), rng.choice("abc")
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        seq = cache.begin(prompt, space, tenant=tenant)
        try:
            seq.allocate(len(prompt))
            seq.commit(len(prompt))
            prompts.append((space, tenant, prompt))
            running.append(seq)
        except OutOfBlocks:
            seq.release()
        if len(running) > 2:
            running.pop(0).release()
    for seq in running:
        seq.release()
    return prompts


@pytest.mark.parametrize("sharing", ["isolated", "shared", "k_anonymous", "public"])
@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_matches_and_the_same_blocks(index: Any, sharing: Any, seed: int) -> None:
    cache = PrefixCache(30, block_size=3, index=index, sharing=sharing)
    if sharing == "public":
        cache.register_public([0, 1, 0, 1, 0])
    prompts = live(cache, seed)
    again = PrefixCache(32, block_size=3, index=index, sharing=sharing)
    again.load(cache.save())
    again.check_invariants()
    assert again.num_cached_blocks == cache.num_cached_blocks
    for space, _, prompt in prompts:
        for tenant in "abcd":
            before = cache.match([*prompt, 9], space, tenant=tenant)
            after = again.match([*prompt, 9], space, tenant=tenant)
            assert after.num_tokens == before.num_tokens
            assert after.blocks.tolist() == before.blocks.tolist()


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("seed", range(5))
def test_the_same_evictions_in_the_same_order(index: Any, seed: int) -> None:
    cache = PrefixCache(24, block_size=2, index=index, sharing="shared", policy="lru")
    prompts = live(cache, seed)
    again = PrefixCache(24, block_size=2, index=index, sharing="shared", policy="lru")
    again.load(cache.save())
    fillers = [list(range(100 * i, 100 * i + 4)) for i in range(1, 10)]
    for filler in fillers:
        for one in (cache, again):
            seq = one.begin(filler)
            seq.allocate(4)
            seq.commit(4)
            seq.release()
        for space, _, prompt in prompts:
            assert again.match([*prompt, 9], space).num_tokens == cache.match([*prompt, 9], space).num_tokens


def test_what_is_pinned_is_saved_as_the_latest_and_what_is_private_not() -> None:
    cache = PrefixCache(16, block_size=4)
    engine = MiniEngine(cache)
    engine.serve(range(8))
    running = cache.begin([*range(8), 70, 71])
    running.allocate(10)
    running.commit(9)
    again = PrefixCache(3, block_size=4)
    with pytest.raises(ValueError, match="needs 16 blocks"):
        again.load(cache.save())
    again = PrefixCache(16, block_size=4)
    again.load(cache.save())
    assert again.num_cached_blocks == 3
    assert again.match([*range(8), 70, 71]).num_tokens == 9


def test_content_keeps_its_names() -> None:
    cache = PrefixCache(16, block_size=2)
    prompt, content = [1, 2, 9, 9, 9, 9, 3], [(2, 6, b"cat")]
    seq = cache.begin(prompt, content=content)
    seq.allocate(7)
    seq.commit(7)
    seq.release()
    again = PrefixCache(16, block_size=2)
    again.load(cache.save())
    assert again.match([*prompt, 0], content=content).num_tokens == 7
    assert again.match([*prompt, 0], content=[(2, 6, b"dog")]).num_tokens == 2


@pytest.fixture(scope="module")
def file() -> bytes:
    cache = PrefixCache(20, block_size=3)
    live(cache, 1)
    return cache.save()


def refused(file: bytes, **options: Any) -> bool:
    cache = PrefixCache(20, **{"block_size": 3, **options})
    with contextlib.suppress(ValueError):
        cache.load(file)
        return False
    cache.check_invariants()
    return cache.num_cached_blocks == 0 and cache.num_free_blocks == 20


def test_a_truncated_file_is_refused_whole(file: bytes) -> None:
    assert not refused(file)
    for length in range(len(file)):
        assert refused(file[:length])
    assert refused(file + b"x")


def test_a_damaged_file_is_refused_whole(file: bytes) -> None:
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(file)
        damaged[rng.randrange(len(file))] ^= 1 << rng.randrange(8)
        assert refused(bytes(damaged))


@pytest.mark.parametrize("options", [{"block_size": 4}, {"index": "hash"}, {"sharing": "shared"}])
def test_another_shape_is_refused(file: bytes, options: dict[str, Any]) -> None:
    assert refused(file, **options)


@pytest.mark.parametrize("foreign", [b"", b"CDXCACHE", b"\x89PNG\r\n\x1a\n" * 9, b"CDXCACHE" + b"\xff" * 99])
def test_a_foreign_file_is_refused(foreign: bytes) -> None:
    assert refused(foreign)


def test_a_cache_in_use_does_not_load(file: bytes) -> None:
    cache = PrefixCache(20, block_size=3)
    cache.begin([1])
    busy = cache.begin([2])
    with pytest.raises(ValueError, match="empty cache"):
        cache.load(file)
    busy.release()
