"""Callers may invent a namespace or a tenant with every request: what is remembered of them is bounded by the pool."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cache.engine_double import MiniEngine

from caudex.cache import OutOfBlocks, PrefixCache

REMEMBERED = 256
CROWD = 2 * REMEMBERED + 8
STEADY = list(range(100, 121))

both_indexes = pytest.mark.parametrize("index", ["radix", "hash"])


def send(cache: PrefixCache, tokens: list[int], namespace: str = "", tenant: str = "") -> int:
    seq = cache.begin(tokens, namespace, tenant=tenant)
    hit = seq.num_cached_tokens
    seq.allocate(len(tokens))
    seq.commit(len(tokens))
    seq.release()
    return hit


def pass_by(cache: PrefixCache, name: str, count: int = CROWD) -> None:
    """So many namespaces and tenants, each asks once and leaves nothing."""
    for i in range(count):
        cache.begin([1], f"{name} {i}", tenant=f"{name} {i}").release()


@both_indexes
def test_a_million_namespaces_cost_no_more_than_some_hundreds(index: Any) -> None:
    cache = PrefixCache(64, block_size=4, index=index, policy="lru")
    begin = cache.begin
    hits = send(cache, STEADY)
    peak = 0
    for i in range(1_000_000):
        if i < 1000:
            peak = max(peak, cache.num_bytes)
        if i % 1000 == 0:
            hits += send(cache, STEADY)
        begin([1], str(i + 1_000_000)).release()
    assert cache.num_bytes <= peak
    assert len(cache.namespaces()) <= REMEMBERED
    assert cache.num_nodes <= REMEMBERED + 8
    assert hits == 1000 * 20, "and nobody else notices"
    assert cache.stats().requests == 1_001_001
    assert cache.stats().evicted_blocks == 0
    cache.check_invariants()


@both_indexes
@pytest.mark.parametrize("sharing", ["isolated", "shared", "public", "k_anonymous"])
@pytest.mark.parametrize("policy", ["lru", "gittins"])
def test_tenants_who_fill_the_pool_are_forgotten_with_their_blocks(index: Any, sharing: Any, policy: str) -> None:
    cache = PrefixCache(16, block_size=4, index=index, policy=policy, sharing=sharing, secret=0)
    peak = 0
    for i in range(4000):
        send(cache, [i, 1, 2, 3, 4, 5], tenant=f"tenant {i:08}")
        if i < 2000:
            peak = max(peak, cache.num_bytes)
    assert cache.num_bytes <= peak * 1.02
    stats = cache.stats()
    assert (stats.requests, stats.lookup_tokens, stats.committed_tokens) == (4000, 24_000, 24_000)
    assert stats.evicted_blocks == 4000 * (1 + (index == "radix")) - cache.num_cached_blocks
    cache.check_invariants()


def test_what_is_in_use_is_not_forgotten() -> None:
    cache = PrefixCache(16, block_size=4, sharing="public")
    send(cache, STEADY, "cached")
    running = cache.begin([1, 2], "running")
    pin = cache.pin([5, 6, 7], "pinned")
    cache.register_public(STEADY, "registered")
    pass_by(cache, "stranger")
    assert {"cached", "running", "pinned", "registered"} <= set(cache.namespaces())
    assert cache.stats("cached").committed_tokens == len(STEADY)
    assert send(cache, STEADY, "cached") == len(STEADY) - 1
    running.release()
    pin.release()
    cache.clear()
    pass_by(cache, "another")
    assert {"cached", "running", "pinned"}.isdisjoint(cache.namespaces())
    send(cache, STEADY, "registered", "one")
    assert send(cache, STEADY, "registered", "two") == len(STEADY) - 1, "what is registered stays so"
    cache.check_invariants()


def test_counters_of_the_forgotten_live_on_in_the_sum() -> None:
    cache = PrefixCache(8, block_size=4)
    send(cache, STEADY, "brief")
    before = cache.stats()
    cache.clear()
    pass_by(cache, "stranger")
    assert cache.stats("brief").requests == 0
    assert cache.stats().requests == before.requests + CROWD
    assert cache.stats().committed_tokens == before.committed_tokens
    assert cache.stats().lookup_tokens == sum(
        (cache.stats().hit_whole_tokens, cache.stats().hit_partial_tokens, cache.stats().missed_tokens)
    )


def test_refused_pins_leave_no_names_behind() -> None:
    cache = PrefixCache(8, block_size=4, pin_budget=1)
    for i in range(CROWD):
        cache.pin([1, 2, 3, 4], f"stranger {i}").release()
        with pytest.raises(ValueError, match="at least one token"):
            cache.begin([], f"empty {i}")
    assert len(cache.namespaces()) <= REMEMBERED
    MiniEngine(cache).serve(range(8))
    with pytest.raises(OutOfBlocks):
        cache.pin(range(8))


@both_indexes
def test_a_namespace_with_an_old_ones_place_is_not_taken_for_it(index: Any) -> None:
    """Neither what was evicted from the old one nor why it misses is told of the new one, nor lost to the old one."""
    cache = PrefixCache(16, block_size=4, index=index, thrash_window=1000)
    send(cache, STEADY, "old")
    for i in range(8):
        send(cache, [500 + i] * 8, "old")
    pass_by(cache, "stranger")
    for i in range(8):
        send(cache, [600 + i] * 8, "elsewhere")
    assert "old" in cache.namespaces()
    while cache.match(STEADY, "old").num_tokens or cache.occupancy("old").cached_blocks:
        send(cache, [700 + cache.stats().requests] * 8, "elsewhere")
    pass_by(cache, "another")
    assert "old" not in cache.namespaces()
    for i in range(REMEMBERED):
        name = f"new {i}"
        assert cache.match(STEADY, name).num_tokens == 0
        assert cache.explain(STEADY, name).reason != "evicted"
        cache.begin(STEADY, name).release()
    assert cache.explain(STEADY, "old").reason == "evicted"
    send(cache, STEADY, "new")
    assert cache.stats("new").thrashed_tokens == 0
    send(cache, STEADY, "old")
    assert cache.stats("old").thrashed_tokens == 20


def test_events_name_the_namespace_they_happened_in() -> None:
    cache = PrefixCache(4, block_size=4, policy="lru")
    cache.enable_events()
    send(cache, [1, 2, 3, 4], "told later")
    for i in range(4):
        send(cache, [10 + i] * 4, "elsewhere")
    pass_by(cache, "stranger")
    stored = [event for event in cache.take_events() if event[0] == "stored"]
    assert (stored[0][3], stored[0][4]) == ([1, 2, 3, 4], "told later")
    assert {event[4] for event in stored[1:]} == {"elsewhere"}
    pass_by(cache, "another")
    assert "told later" not in cache.namespaces()


# ----------------------------------------------------------------------------------------------------- tenants


@both_indexes
def test_forgetting_tenants_opens_nothing_and_counts_nobody_twice(index: Any) -> None:
    """One of the two that are needed has computed the prefix; a crowd that has not cannot stand in for the other."""
    cache = PrefixCache(32, block_size=4, index=index, sharing="k_anonymous", k=3)
    send(cache, STEADY, tenant="a")
    send(cache, STEADY, tenant="b")
    for crowd in ("one", "two"):
        for i in range(CROWD):
            tenant = f"{crowd} {i}"
            assert cache.match(STEADY, tenant=tenant).num_tokens == 0
            cache.begin([1], tenant=tenant).release()
        assert send(cache, STEADY, tenant="a") == len(STEADY) - 1, "it is still known, and still counts once"
    assert cache.match(STEADY, tenant="stranger").num_tokens == 0
    send(cache, STEADY, tenant="c")
    assert cache.match(STEADY, tenant="stranger").num_tokens == len(STEADY) - 1


@both_indexes
def test_a_running_tenant_keeps_its_identity(index: Any) -> None:
    """What it commits after a crowd has passed is its own, and nobody else's who came with the crowd."""
    cache = PrefixCache(32, block_size=4, index=index, sharing="public")
    seq = cache.begin(STEADY, tenant="slow")
    pass_by(cache, "stranger")
    seq.allocate(len(STEADY))
    seq.commit(len(STEADY))
    seq.release()
    for i in range(CROWD):
        cache.begin([1], tenant=f"late {i}").release()
        assert cache.match(STEADY, tenant=f"late {i}").num_tokens == 0
    assert cache.match(STEADY, tenant="slow").num_tokens == len(STEADY) - 1


@both_indexes
@pytest.mark.parametrize("sharing", ["isolated", "shared", "public", "k_anonymous"])
def test_a_snapshot_keeps_who_may_see_what_in_a_cache_that_knows_others(index: Any, sharing: Any) -> None:
    cache = PrefixCache(32, block_size=4, index=index, sharing=sharing, k=3)
    pass_by(cache, "stranger")
    for tenant, first in (("a", 100), ("b", 200), ("c", 300)):
        send(cache, [*range(first, first + 8), 1], tenant=tenant)
    pass_by(cache, "another", 40)
    again = PrefixCache(32, block_size=4, index=index, sharing=sharing, k=3)
    pass_by(again, "native", 10)
    for tenant in "cab":
        again.begin([1], tenant=tenant).release()
    again.load(cache.save())
    again.check_invariants()
    for tenant in ("a", "b", "c", "native 1", "another 39", "new"):
        for first in (100, 200, 300):
            prompt = [*range(first, first + 8), 2]
            found = again.match(prompt, tenant=tenant).num_tokens
            assert found == cache.match(prompt, tenant=tenant).num_tokens
