"""Why a prompt did not hit further."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cache.engine_double import MiniEngine

from caudex.cache import PrefixCache

PROMPT = list(range(12))

both = pytest.mark.parametrize("index", ["radix", "hash"])


def make(index: Any, num_blocks: int = 16, **options: Any) -> tuple[PrefixCache, MiniEngine]:
    cache = PrefixCache(num_blocks, block_size=4, index=index, manual_clock=True, thrash_window=8, **options)
    return cache, MiniEngine(cache)


@both
def test_never_seen(index: str) -> None:
    cache, engine = make(index)
    engine.serve([50, 51, 52, 53, 54])
    assert cache.explain(PROMPT).reason == "never_seen"


@both
def test_complete(index: str) -> None:
    cache, engine = make(index)
    engine.serve(PROMPT)
    assert cache.explain([*PROMPT, 99]).reason == "complete"


@both
def test_evicted_when_and_by_which_policy(index: str) -> None:
    cache, engine = make(index, 3)
    cache.set_time(100.0)
    engine.serve(PROMPT)
    cache.set_time(107.0)
    engine.serve([50, 51, 52, 53, 54])
    cache.set_time(110.0)
    told = cache.explain([*PROMPT, 99])
    assert (told.reason, told.policy, told.num_cached) == ("evicted", "gittins", 4)
    assert told.num_evicted == 8
    assert told.evicted_seconds_ago == pytest.approx(3.0)


@both
def test_another_namespace_has_it(index: str) -> None:
    cache, engine = make(index)
    engine.serve(PROMPT, "the other model")
    told = cache.explain([*PROMPT, 99])
    assert (told.reason, told.other_namespace, told.num_cached_there) == ("other_namespace", "the other model", 12)


@both
def test_another_tenant_has_it(index: str) -> None:
    cache, _ = make(index, sharing="k_anonymous", k=2)
    seq = cache.begin(PROMPT, tenant="a")
    seq.allocate(12)
    seq.commit(12)
    told = cache.explain([*PROMPT, 99], tenant="b")
    assert (told.reason, told.num_cached, told.num_cached_there) == ("other_namespace", 0, 12)


def test_diverged_at_which_token_from_what() -> None:
    cache, engine = make("radix")
    engine.serve(PROMPT)
    told = cache.explain([0, 1, 2, 3, 4, 5, 60, 7, 8])
    assert (told.reason, told.num_cached, told.diverged_at) == ("diverged", 6, 6)
    assert told.expected_tokens.tolist()[:3] == [6, 7, 8]


def test_the_hash_index_loses_what_is_below_a_block() -> None:
    cache, engine = make("hash")
    engine.serve(PROMPT)
    told = cache.explain([0, 1, 2, 3, 4, 5, 60, 7, 8])
    assert (told.reason, told.num_cached, told.diverged_at) == ("below_block", 4, 6)
    assert told.expected_tokens.tolist()[:2] == [6, 7]
