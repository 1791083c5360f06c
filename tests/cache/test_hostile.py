"""No argument, however odd, crashes the process or corrupts the cache: an exception, and nothing has changed."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from caudex.cache import OutOfBlocks, PrefixCache, SessionHints

BAD_TOKENS = [
    None,
    5,
    1.5,
    "text",
    b"bytes",
    bytearray(b"1234"),
    [1.5],
    ["a"],
    [None],
    [[1, 2]],
    [-1],
    [2**31],
    [10**40],
    [float("nan")],
    {1: 2},
    np.array([1.0, 2.0]),
    np.array([np.nan]),
    np.array([[1, 2], [3, 4]], np.int32),
    np.array(3, np.int32),
    np.array([-1], np.int32),
    np.array([-1, 5], np.int64),
    np.array([2**31], np.int64),
    np.array([2**63], np.uint64),
    np.array([True, False]),
    np.array(["a"]),
    np.array([1, None], object),
    np.array([1 + 2j]),
    object(),
]
BAD_COUNTS = [-1, -(2**63), 2**63, 10**30, None, "3", 2.5, float("nan"), float("inf"), [], 2**62]
FAILS = (ValueError, TypeError, OverflowError, OutOfBlocks)


@pytest.fixture
def cache() -> PrefixCache:
    cache = PrefixCache(8, block_size=4)
    seq = cache.begin([1, 2, 3, 4, 5])
    seq.allocate(5)
    seq.commit(5)
    seq.release()
    return cache


def state(cache: PrefixCache) -> tuple[Any, ...]:
    cache.check_invariants()
    return cache.num_free_blocks, cache.num_cached_blocks, cache.dump(), cache.stats().lookup_tokens


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=lambda t: type(t).__name__ + str(t)[:12])
@pytest.mark.parametrize("method", ["match", "begin", "resume", "explain", "pin"])
def test_bad_tokens_are_refused(cache: PrefixCache, method: str, tokens: Any) -> None:
    before = state(cache)
    with pytest.raises(FAILS):
        getattr(cache, method)(tokens)
    assert state(cache) == before


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=lambda t: type(t).__name__ + str(t)[:12])
def test_bad_tokens_are_not_appended(cache: PrefixCache, tokens: Any) -> None:
    seq = cache.begin([1, 2])
    with pytest.raises(FAILS):
        seq.append(tokens)
    with pytest.raises(FAILS):
        cache.append_and_allocate([seq], tokens)
    with pytest.raises(FAILS):
        cache.count_cached([[1], tokens])
    assert seq.num_tokens == 2


@pytest.mark.parametrize("count", BAD_COUNTS, ids=str)
def test_bad_counts_are_refused(cache: PrefixCache, count: Any) -> None:
    seq = cache.begin([1, 2, 3])
    seq.allocate(3)
    before = state(cache)
    for call in (seq.allocate, seq.commit, cache.resize, PrefixCache):
        with pytest.raises(FAILS):
            call(count)
    with pytest.raises(FAILS):
        PrefixCache(4, count)
    assert state(cache) == before


@pytest.mark.parametrize(
    "options",
    [
        {"index": "trie"},
        {"policy": "belady"},
        {"policy": ""},
        {"hash": "md5"},
        {"sharing": "everyone"},
        {"sharing": "k_anonymous", "k": 1},
        {"thrash_window": -1},
        {"pin_budget": 9},
        {"pin_budget": -1},
        {"block_size": 0},
        {"num_blocks": 0},
        {"secret": -1},
    ],
    ids=str,
)
def test_bad_options_are_refused_by_value(options: dict[str, Any]) -> None:
    with pytest.raises(FAILS):
        PrefixCache(**{"num_blocks": 8, **options})


def test_messages_name_the_value_and_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'belady': choose one of lru"):
        PrefixCache(8, policy="belady")
    with pytest.raises(ValueError, match=r"block_size must be from 1 to 65536, got 0"):
        PrefixCache(8, 0)
    with pytest.raises(ValueError, match=r"got -7 at index 1"):
        PrefixCache(8).begin([1, -7])
    with pytest.raises(ValueError, match=r"cannot commit 3 tokens: the sequence has 3 and slots for 0"):
        PrefixCache(8).begin([1, 2, 3]).commit(3)
    with pytest.raises(ValueError, match="at least one token"):
        PrefixCache(8).begin([])


ACTIONS: list[Callable[[Any], Any]] = [
    lambda seq: seq.num_tokens,
    lambda seq: seq.num_cached_tokens,
    lambda seq: seq.num_committed_tokens,
    lambda seq: seq.tokens,
    lambda seq: seq.block_table,
    lambda seq: seq.allocate(1),
    lambda seq: seq.append([1]),
    lambda seq: seq.commit(1),
    lambda seq: seq.fork(),
    lambda seq: seq.release(),
    lambda seq: seq.set_hints(SessionHints()),
]


@pytest.mark.parametrize("action", range(len(ACTIONS)))
def test_a_released_sequence_raises_whatever_is_asked(cache: PrefixCache, action: int) -> None:
    seq = cache.begin([1, 2, 3])
    seq.release()
    before = state(cache)
    with pytest.raises(ValueError, match="released"):
        ACTIONS[action](seq)
    assert seq.is_released
    assert state(cache) == before


def test_batches_refuse_what_does_not_belong_to_them(cache: PrefixCache) -> None:
    seq, gone, foreign = cache.begin([1]), cache.begin([1]), PrefixCache(4).begin([1])
    gone.release()
    for batch, tokens in [([seq, seq], [1, 2]), ([seq, gone], [1, 2]), ([seq, foreign], [1, 2]), ([seq], [1, 2])]:
        with pytest.raises(ValueError, match=r"twice|released|another cache|tokens"):
            cache.append_and_allocate(batch, tokens)
    for batch in ([None], [1], ["seq"]):
        with pytest.raises(TypeError, match="a batch is a list of sequences, got <class"):
            cache.append_and_allocate(batch, [1])
    assert seq.num_tokens == 1
    cache.check_invariants()


def test_odd_but_valid_arrays_are_taken(cache: PrefixCache) -> None:
    base = np.arange(20)
    for tokens in (base[1:11:2], base[10:0:-2], base.astype(np.uint16)[:3], np.arange(6, dtype=np.int32)[::-1], (1, 2)):
        seq = cache.begin(tokens)
        assert seq.tokens.tolist() == list(tokens)
        seq.release()


def test_a_read_only_array_is_fine(cache: PrefixCache) -> None:
    tokens = np.array([1, 2, 3, 4, 9], np.int32)
    tokens.flags.writeable = False
    assert cache.match(tokens).num_tokens == 4


def test_sequences_that_are_dropped_are_released(cache: PrefixCache) -> None:
    for _ in range(50):
        cache.begin([1, 2, 3, 4, 5, 6]).allocate(6)
    gc.collect()
    assert cache.num_pinned_blocks == 0
    cache.check_invariants()


def test_a_cache_may_go_before_its_sequences() -> None:
    cache = PrefixCache(4, block_size=2)
    seq = cache.begin([1, 2, 3])
    del cache
    gc.collect()
    seq.allocate(3)
    seq.commit(3)
    seq.release()


def test_names_may_be_anything_but_contain_nul(cache: PrefixCache) -> None:
    for name in ("", "ü", "a" * 10_000, "x\ny", "../..", "{}"):
        assert cache.match([91, 92], name).num_tokens == 0
        cache.begin([91, 92], name, tenant=name).release()
    with pytest.raises(ValueError, match="NUL"):
        cache.begin([1, 2], "a\0b")
    cache.check_invariants()


def test_two_threads_that_share_one_sequence_do_not_break_it() -> None:
    cache = PrefixCache(64, block_size=4)
    seq = cache.begin([1])
    errors: list[BaseException] = []

    def work() -> None:
        for _ in range(300):
            try:
                seq.append([1])
                n = seq.num_tokens
                seq.allocate(min(n, 200))
                seq.commit(min(n, 100))
                _ = seq.block_table
            except (ValueError, OutOfBlocks):
                pass
            except BaseException as error:
                errors.append(error)
        if not seq.is_released:
            with contextlib.suppress(ValueError):
                seq.release()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert cache.num_pinned_blocks == 0
    cache.check_invariants()
