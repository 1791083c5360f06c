"""The peers' rules, one by one. Whole traces against the peers themselves: benchmarks/test_peer_parity.py."""

from __future__ import annotations

from typing import Any

import pytest

from caudex.cache import OutOfBlocks, PrefixCache


def serve(cache: Any, tokens: list[int]) -> int:
    seq = cache.begin(tokens)
    seq.allocate(len(tokens))
    seq.commit(len(tokens))
    hit: int = seq.num_cached_tokens
    seq.release()
    return hit


def hit(cache: Any, tokens: list[int]) -> int:
    seq = cache.begin([*tokens, 0])
    found: int = seq.num_cached_tokens
    seq.release()
    return found


class TestVllm:
    def test_an_aligned_full_hit_computes_a_whole_block_again(self) -> None:
        cache = PrefixCache.like_vllm(9, 4)
        assert serve(cache, list(range(8))) == 0
        assert serve(cache, list(range(8))) == 4

    def test_blocks_are_matchable_when_scheduled(self) -> None:
        cache = PrefixCache.like_vllm(9, 4)
        cache.begin(list(range(8))).allocate(8)
        first = cache.begin(list(range(8)))
        first.allocate(8)
        assert hit(cache, list(range(8))) == 8

    def test_one_block_is_set_aside(self) -> None:
        cache = PrefixCache.like_vllm(3, 4)
        seq = cache.begin(list(range(12)))
        with pytest.raises(OutOfBlocks):
            seq.allocate(12)
        seq.allocate(8)

    def test_the_last_block_of_the_oldest_request_goes_first(self) -> None:
        cache = PrefixCache.like_vllm(5, 4)
        serve(cache, list(range(8)))
        serve(cache, list(range(100, 108)))
        serve(cache, list(range(200, 204)))
        assert hit(cache, list(range(8))) == 4
        assert hit(cache, list(range(100, 108))) == 8

    def test_a_block_without_a_hash_is_used_again_first(self) -> None:
        cache = PrefixCache.like_vllm(4, 4)
        serve(cache, list(range(6)))
        serve(cache, [50])
        assert hit(cache, list(range(4))) == 4

    def test_equal_blocks_are_kept_and_outlive_each_other(self) -> None:
        cache = PrefixCache.like_vllm(4, 4)
        one, two = cache.begin([1, 2, 3, 4]), cache.begin([1, 2, 3, 4])
        one.allocate(4)
        two.allocate(4)
        assert cache.num_free_blocks == 1
        one.release()
        two.release()
        serve(cache, list(range(50, 58)))
        assert hit(cache, [1, 2, 3, 4]) == 4

    def test_a_hit_that_does_not_fit_takes_nothing(self) -> None:
        cache = PrefixCache.like_vllm(4, 4)
        serve(cache, list(range(8)))
        seq = cache.begin(list(range(16)))
        with pytest.raises(OutOfBlocks):
            seq.allocate(16)
        assert cache.num_free_blocks == 3

    def test_the_queue_is_freed_last_block_first_with_unhashed_ones_in_front(self) -> None:
        cache = PrefixCache.like_vllm(6, 4)
        seq = cache.begin(list(range(10)))
        seq.allocate(10)
        assert (seq.block_table, cache.eviction_order()) == ([1, 2, 3], [4, 5])
        seq.release()
        assert cache.eviction_order() == [3, 4, 5, 2, 1]

    def test_a_hit_leaves_the_queue_when_it_is_allocated(self) -> None:
        cache = PrefixCache.like_vllm(6, 4)
        serve(cache, list(range(8)))
        seq = cache.begin(list(range(9)))
        assert cache.eviction_order() == [3, 4, 5, 2, 1]
        seq.allocate(9)
        assert (seq.block_table, cache.eviction_order()) == ([1, 2, 3], [4, 5])

    def test_a_reset_waits_until_nothing_runs(self) -> None:
        cache = PrefixCache.like_vllm(6, 4)
        seq = cache.begin(list(range(8)))
        seq.allocate(8)
        assert not cache.reset()
        seq.release()
        order = cache.eviction_order()
        assert cache.reset()
        assert cache.eviction_order() == order
        assert hit(cache, list(range(8))) == 0


class TestSglang:
    def test_matches_end_at_pages(self) -> None:
        cache = PrefixCache.like_sglang(8, 4)
        assert serve(cache, list(range(10))) == 0
        assert serve(cache, list(range(10))) == 8
        assert serve(cache, list(range(8))) == 4

    def test_a_page_of_one_token_matches_to_the_token(self) -> None:
        cache = PrefixCache.like_sglang(32)
        serve(cache, list(range(10)))
        assert hit(cache, [*range(7), 70]) == 7

    def test_leaves_go_whole(self) -> None:
        cache = PrefixCache.like_sglang(4, 4)
        serve(cache, list(range(12)))
        serve(cache, list(range(100, 108)))
        assert cache.num_evicted_tokens == 12
        assert hit(cache, list(range(12))) == 0

    def test_a_look_up_touches_the_rest_of_a_node_too(self) -> None:
        cache = PrefixCache.like_sglang(4, 4)
        serve(cache, list(range(8)))
        serve(cache, list(range(100, 104)))
        assert hit(cache, [0, 1, 2, 3]) == 4
        serve(cache, list(range(200, 208)))
        assert hit(cache, list(range(100, 104))) == 0
        assert hit(cache, list(range(8))) == 8

    def test_what_is_locked_stays(self) -> None:
        cache = PrefixCache.like_sglang(3, 4)
        serve(cache, list(range(8)))
        holder = cache.begin(list(range(9)))
        with pytest.raises(OutOfBlocks):
            cache.begin(list(range(100, 108))).allocate(8)
        holder.release()
        cache.begin(list(range(100, 108))).allocate(8)

    def test_the_order_is_of_leaves_by_last_access(self) -> None:
        cache = PrefixCache.like_sglang(20)
        serve(cache, [1, 2, 3, 4])
        serve(cache, [1, 2, 5])
        serve(cache, [7, 8])
        assert cache.eviction_order() == [([1, 2, 3, 4], 2), ([1, 2, 5], 1), ([7, 8], 2)]
        hit(cache, [1, 2, 3])
        assert cache.eviction_order() == [([1, 2, 5], 1), ([7, 8], 2), ([1, 2, 3, 4], 1)]

    def test_a_reset_waits_until_nothing_runs(self) -> None:
        cache = PrefixCache.like_sglang(8, 4)
        serve(cache, list(range(8)))
        holder = cache.begin(list(range(9)))
        assert not cache.reset()
        holder.release()
        idle = cache.begin([50])
        assert cache.reset()
        assert (cache.eviction_order(), cache.num_free_pages) == ([], 8)
        idle.allocate(1)
        idle.release()
        assert hit(cache, list(range(8))) == 0


@pytest.mark.parametrize("make", [PrefixCache.like_vllm, PrefixCache.like_sglang])
def test_hostile_arguments(make: Any) -> None:
    for size in (-1, 0, 2**40):
        with pytest.raises(ValueError, match="must be"):
            make(size)
    cache = make(8, 4)
    for tokens in ([], [-1], [2**31], ["a"], None):
        with pytest.raises((ValueError, TypeError)):
            cache.begin(tokens)
    seq = cache.begin([1, 2, 3])
    with pytest.raises(ValueError, match="negative"):
        seq.allocate(-1)
    with pytest.raises(OutOfBlocks):
        seq.allocate(2**40)
    seq.release()
    for call in (lambda: seq.allocate(1), lambda: seq.append([1]), lambda: seq.commit(1), seq.release):
        with pytest.raises(ValueError, match="released"):
            call()
