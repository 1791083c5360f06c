"""Counters are exact and their sums close; occupancy says where every slot is."""

from __future__ import annotations

from tests.cache.engine_double import MiniEngine

from caudex.cache import PrefixCache, SessionHints


def test_every_looked_up_token_is_hit_or_missed() -> None:
    cache = PrefixCache(16, block_size=4)
    engine = MiniEngine(cache)
    engine.serve(range(10), "a")
    engine.serve([*range(6), 70, 71], "a")
    engine.serve(range(10), "b")
    a, b, both = cache.stats("a"), cache.stats("b"), cache.stats()
    assert (a.requests, a.lookup_tokens, a.hit_whole_tokens, a.hit_partial_tokens, a.missed_tokens) == (2, 18, 4, 2, 12)
    assert (b.requests, b.lookup_tokens, b.missed_tokens, b.committed_tokens) == (1, 10, 10, 10)
    assert both.lookup_tokens == a.lookup_tokens + b.lookup_tokens
    assert cache.namespaces() == ["a", "b"]


def test_resumed_requests_do_not_count_as_hits() -> None:
    cache = PrefixCache(16, block_size=4)
    MiniEngine(cache).serve(range(10))
    seq = cache.resume(range(10))
    stats = cache.stats()
    assert seq.num_cached_tokens == 9
    assert (stats.requests, stats.hit_whole_tokens, stats.resumed_requests, stats.resumed_hit_tokens) == (1, 0, 1, 9)


def test_thrash_is_what_is_computed_again_soon_after_its_eviction() -> None:
    cache = PrefixCache(3, block_size=4, thrash_window=6)
    engine = MiniEngine(cache)
    engine.serve(range(12), "a")
    engine.serve(range(100, 112), "b")
    engine.serve(range(12), "a")
    assert cache.stats("a").thrashed_tokens == 12
    assert cache.stats("b").thrashed_tokens == 0
    assert (cache.stats("a").evicted_blocks, cache.stats("b").evicted_blocks) == (3, 3)
    for i in range(4):
        engine.serve(range(1000 + 20 * i, 1012 + 20 * i), "c")
    engine.serve(range(12), "a")
    assert cache.stats("a").thrashed_tokens == 12, "by then it was forgotten"


def test_occupancy_adds_up_by_namespace() -> None:
    cache = PrefixCache(16, block_size=4)
    engine = MiniEngine(cache)
    engine.serve(range(10), "a")
    seq = cache.begin(range(6), "b")
    seq.allocate(11)
    a, b, both = cache.occupancy("a"), cache.occupancy("b"), cache.occupancy()
    assert (a.pinned_blocks, a.cached_blocks, a.unused_slots) == (0, 3, 2)
    assert (b.pinned_blocks, b.cached_blocks, b.unused_slots) == (3, 0, 6)
    assert (both.pinned_blocks, both.cached_blocks) == (cache.num_pinned_blocks, cache.num_cached_blocks)


def test_slots_that_lie_there_twice_are_counted() -> None:
    cache = PrefixCache(16, block_size=4)
    engine = MiniEngine(cache)
    engine.serve([0, 1, 2, 3])
    engine.serve([0, 1, 2, 30])
    assert cache.occupancy().repeated_slots == 6, "both blocks hold the three tokens that the prompts share"
    assert cache.num_cached_blocks == 2


def test_a_pin_outlives_its_request_and_stays_in_its_budget() -> None:
    cache = PrefixCache(4, block_size=4, pin_budget=2)
    engine = MiniEngine(cache)
    engine.serve(range(8))
    pin = cache.pin(range(8))
    assert (pin.num_tokens, cache.num_pinned_blocks) == (8, 2)
    engine.serve(range(100, 108))
    engine.serve(range(200, 208))
    assert cache.match(range(9)).num_tokens == 8
    pin.release()
    engine.serve(range(300, 316))
    assert cache.match(range(9)).num_tokens == 0


def test_hints_are_kept_with_the_request() -> None:
    hints = SessionHints(session=7, expected_return=2.5, ends=True, priority=1.0)
    assert (hints.session, hints.expected_return, hints.ends, hints.priority) == (7, 2.5, True, 1.0)
    cache = PrefixCache(4)
    seq = cache.begin([1, 2], hints=hints)
    seq.set_hints(SessionHints())
    seq.release()
