"""A request's way through the cache, step by step."""

import numpy as np
import pytest

from caudex.cache import OutOfBlocks, PrefixCache


def finish(cache: PrefixCache, tokens: list[int], namespace: str = "") -> int:
    seq = cache.begin(tokens, namespace)
    hit = seq.num_cached_tokens
    seq.allocate(len(tokens))
    seq.commit(len(tokens))
    seq.release()
    cache.check_invariants()
    return hit


def test_a_second_request_finds_what_the_first_has_computed() -> None:
    cache = PrefixCache(8, block_size=4)
    assert finish(cache, [1, 2, 3, 4, 5, 6]) == 0
    assert finish(cache, [1, 2, 3, 4, 5, 9]) == 5
    assert finish(cache, [1, 2, 3, 4, 5, 6]) == 5, "at least one token is always computed"


def test_the_hash_index_shares_whole_blocks_only() -> None:
    cache = PrefixCache(8, block_size=4, index="hash")
    assert finish(cache, [1, 2, 3, 4, 5, 6]) == 0
    assert finish(cache, [1, 2, 3, 4, 5, 9]) == 4
    assert cache.match([1, 2, 3, 4]).num_tokens == 0


def test_a_partial_hit_copies_the_first_slots_of_a_block() -> None:
    cache = PrefixCache(8, block_size=4)
    finish(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    seq = cache.begin([1, 2, 3, 4, 5, 6, 70, 80])
    assert seq.num_cached_tokens == 6
    first, second = cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).blocks
    (copy,) = seq.allocate(8)
    assert (copy.src, copy.num_slots) == (second, 2)
    assert list(seq.block_table) == [first, copy.dst]


def test_chunks_are_shared_before_the_prompt_is_finished() -> None:
    cache = PrefixCache(8, block_size=4)
    prompt = list(range(12))
    seq = cache.begin(prompt)
    seq.allocate(8)
    assert cache.match(prompt).num_tokens == 0, "slots without KV match nothing"
    seq.commit(6)
    assert cache.match(prompt).num_tokens == 6


def test_the_later_of_two_equal_blocks_is_given_back_at_once() -> None:
    cache = PrefixCache(8, block_size=4)
    one, two = cache.begin([1, 2, 3, 4, 5]), cache.begin([1, 2, 3, 4, 6])
    for seq in (one, two):
        seq.allocate(5)
    one.commit(5)
    free = cache.num_free_blocks
    two.commit(5)
    assert cache.num_free_blocks == free + 1
    assert one.block_table[0] == two.block_table[0]


def test_namespaces_do_not_see_each_other() -> None:
    cache = PrefixCache(8, block_size=4)
    finish(cache, [1, 2, 3, 4, 5], "a")
    assert cache.match([1, 2, 3, 4, 5], "a").num_tokens == 4
    assert cache.match([1, 2, 3, 4, 5], "b").num_tokens == 0


def test_out_of_blocks_changes_nothing() -> None:
    cache = PrefixCache(3, block_size=4)
    seq = cache.begin(list(range(8)))
    seq.allocate(8)
    before = cache.dump()
    with pytest.raises(OutOfBlocks, match="need 2 more blocks"):
        seq.allocate(16)
    assert (len(seq.block_table), cache.num_free_blocks, cache.dump()) == (2, 1, before)


def test_a_decoding_batch_takes_one_call() -> None:
    cache = PrefixCache(16, block_size=4)
    seqs = [cache.begin([i, 1, 2]) for i in range(3)]
    for seq in seqs:
        seq.allocate(3)
    for step in range(6):
        cache.commit_all(seqs)
        cache.append_and_allocate(seqs, np.arange(3, dtype=np.int32) + 10 * step)
    assert [seq.num_tokens for seq in seqs] == [9, 9, 9]
    assert [len(seq.block_table) for seq in seqs] == [3, 3, 3]
    cache.check_invariants()


def test_a_conversation_leaves_one_node_behind() -> None:
    cache = PrefixCache(64, block_size=4, policy="lru")
    history = [1, 2, 3]
    for turn in range(10):
        seq = cache.begin(history)
        assert seq.num_cached_tokens == (len(history) - 2 if turn else 0)
        seq.allocate(len(history))
        seq.commit(len(history))
        for token in range(5):
            seq.append([100 * turn + token])
            seq.allocate(seq.num_tokens)
            seq.commit(seq.num_tokens)
        history = [*seq.tokens.tolist(), 7, 8]
        seq.release()
        cache.check_invariants()
    assert cache.num_nodes == 2, "the root and one run of blocks"
    assert cache.num_cached_blocks == -(-(len(history) - 2) // 4)
