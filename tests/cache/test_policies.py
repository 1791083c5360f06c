from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.block_traces import block_traces, excerpt
from tests.cache.policy_twins import TWINS, twin_hits

from caudex.cache import BlockTrace, PrefixCache, ReplaySettings, SessionHints, policy_names, replay


def hits(trace: BlockTrace, capacity: int, policy: str) -> list[int]:
    (result,) = replay(trace, [ReplaySettings(capacity, policy=policy)])
    return (result.hit_tokens // trace.block_size).tolist()


@pytest.mark.parametrize("policy", TWINS)
@settings(deadline=None, max_examples=100)
@given(trace=block_traces(max_requests=60), capacity=st.integers(1, 30))
def test_every_request_is_served_as_by_the_twin(policy: str, trace: BlockTrace, capacity: int) -> None:
    assert hits(trace, capacity, policy) == twin_hits(trace, capacity, policy)


def test_arc_remembers_as_many_as_the_paper_says_after_some_came_back() -> None:
    paths = [
        [0, 1], [2, 3], [0, 4, 5, 6, 7], [0, 4, 5, 6, 7], [8, 9, 10, 11, 12], [8, 13, 14, 15, 16],
        [0, 17, 18, 19, 20, 21, 22], [0, 1, 23, 24, 25, 26, 27], [2, 28, 29, 30, 31, 32],
        [0, 17, 33, 34, 35, 36, 37, 38], [2, 3, 39, 40, 41, 42, 43, 44], [0, 17, 18], [0, 17, 33, 34, 35],
    ]  # fmt: skip
    trace = BlockTrace.from_paths(paths, [len(path) for path in paths], 1)
    assert hits(trace, 23, "arc") == twin_hits(trace, 23, "arc")


@pytest.mark.parametrize("policy", TWINS)
def test_a_real_trace_is_served_as_by_the_twin(policy: str) -> None:
    trace = excerpt("mooncake_conversation.head").select(slice(0, 150))
    assert hits(trace, 600, policy) == twin_hits(trace, 600, policy)


def serve(cache: PrefixCache, tokens: list[int], hints: SessionHints | None = None) -> None:
    sequence = cache.begin(tokens, hints=hints)
    sequence.allocate(len(tokens))
    sequence.commit(len(tokens))
    sequence.release()
    cache.check_invariants()


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("policy", policy_names())
@settings(deadline=None, max_examples=40)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=40),
    num_blocks=st.integers(14, 30),
    block_size=st.integers(1, 4),
    overlap=st.booleans(),
)
def test_invariants_hold_whatever_is_asked(
    index: str, policy: str, prompts: list[list[int]], num_blocks: int, block_size: int, overlap: bool
) -> None:
    cache = PrefixCache(num_blocks * (2 if overlap else 1), block_size, index=index, policy=policy, manual_clock=True)  # type: ignore[arg-type]
    running = None
    for i, prompt in enumerate(prompts):
        cache.set_time(float(i))
        sequence = cache.begin(prompt)
        sequence.allocate(len(prompt))
        sequence.commit(len(prompt))
        if running is not None:
            running.release()
        running = sequence
        if not overlap:
            running.release()
            running = None
        cache.check_invariants()
    if running is not None:
        running.release()
    cache.clear()
    assert cache.num_free_blocks == cache.num_blocks


@pytest.mark.parametrize("policy", ["lfu", "fifo", "priority"])
def test_a_pin_is_no_use(policy: str) -> None:
    """It keeps its blocks while it lasts, and then they rank as if it had never been."""
    cache = PrefixCache(4, 1, policy=policy)
    serve(cache, [3, 4], SessionHints(priority=-1.0))
    serve(cache, [1, 2])
    serve(cache, [1, 2])
    for _ in range(3):
        cache.pin([3, 4]).release()
    serve(cache, [5, 6])
    assert cache.match([1, 2, 9]).num_tokens == 2
    assert cache.match([3, 4, 9]).num_tokens == 0


def test_a_higher_priority_stays() -> None:
    cache = PrefixCache(4, 1, policy="priority")
    serve(cache, [1, 2], SessionHints(priority=1.0))
    serve(cache, [3, 4])
    serve(cache, [5, 6])
    assert cache.match([1, 2, 9]).num_tokens == 2
    assert cache.match([3, 4, 9]).num_tokens == 0


def test_the_highest_priority_of_all_who_used_it_counts() -> None:
    cache = PrefixCache(4, 1, policy="priority")
    serve(cache, [1, 2], SessionHints(priority=1.0))
    serve(cache, [1, 2])
    serve(cache, [3, 4])
    serve(cache, [5, 6])
    assert cache.match([1, 2, 9]).num_tokens == 2


def test_what_will_be_asked_for_after_a_tool_call_stays() -> None:
    cache = PrefixCache(4, 1, policy="ttl", manual_clock=True)
    serve(cache, [1, 2], SessionHints(expected_return=30.0))
    cache.set_time(10.0)
    serve(cache, [3, 4])
    serve(cache, [5, 6])
    assert cache.match([1, 2, 9]).num_tokens == 2
    cache.set_time(60.0)
    serve(cache, [7, 8])
    serve(cache, [9, 10])
    assert cache.match([1, 2, 9]).num_tokens == 0, "its time is up"


@pytest.mark.parametrize("policy", ["ttl:100", "gittins"])
def test_what_only_a_finished_session_used_goes_first(policy: str) -> None:
    cache = PrefixCache(6, 1, policy=policy, manual_clock=True)
    serve(cache, [1, 2, 3])
    serve(cache, [4, 5, 6], SessionHints(ends=True))
    serve(cache, [7])
    assert cache.match([1, 2, 3, 9]).num_tokens == 3
    assert cache.match([4, 5, 6, 9]).num_tokens == 2


def test_gittins_keeps_what_is_announced_to_return_soon() -> None:
    cache = PrefixCache(6, 1, policy="gittins", manual_clock=True)
    serve(cache, [1, 2, 3], SessionHints(expected_return=20.0))
    cache.set_time(16.0)
    serve(cache, [4, 5, 6], SessionHints(expected_return=5000.0))
    cache.set_time(18.0)
    serve(cache, [7, 8])
    assert cache.match([1, 2, 3, 9]).num_tokens == 3


def test_gittins_learns_what_comes_back() -> None:
    """One kind of conversation is asked for again after 10 s, the other never: LRU cannot tell them apart."""
    rng = np.random.default_rng(0)
    id_paths, times, seen = [], [], 0
    for start in range(0, 4000, 2):
        seen += 10
        returns = rng.random() < 0.5
        path = [int(returns), *range(seen, seen + (3 if returns else 9))]
        id_paths.append(path)
        times.append(float(start))
        if returns:
            id_paths.append([*path, seen + 9])
            times.append(start + 10.0)
    order = np.argsort(times, kind="stable")
    trace = BlockTrace.from_paths(
        [id_paths[i] for i in order], [4 * len(id_paths[i]) + 1 for i in order], 4, timestamps=np.array(times)[order]
    )
    lru, gittins = replay(trace, [ReplaySettings(24), ReplaySettings(24, policy="gittins")])
    assert gittins.hit_rate > 1.5 * lru.hit_rate


def test_gittins_beats_lru_on_a_real_trace() -> None:
    trace = excerpt("mooncake_conversation.head")
    lru, gittins = replay(trace, [ReplaySettings(2000), ReplaySettings(2000, policy="gittins")])
    assert gittins.hit_rate > 1.2 * lru.hit_rate


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("lru:3", "policy 'lru' takes no parameter, got '3'"),
        ("ttl:soon", "parameter of policy 'ttl' must be a number of at least 0, got 'soon'"),
        ("ttl:-1", "must be a number of at least 0, got '-1'"),
        ("ttl:inf", "must be a number of at least 0, got 'inf'"),
        ("clock", "unknown policy 'clock': choose one of lru, fifo, lfu"),
    ],
)
def test_bad_policies_are_refused(policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixCache(10, policy=policy)
