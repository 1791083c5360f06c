"""The policy "gittins" against its twin: the same victims, on any traffic, at any pace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.block_traces import block_traces, excerpt
from tests.cache.gittins_twin import GittinsTwin

from caudex.cache import BlockTrace, OutOfBlocks, PrefixCache, ReplaySettings, SessionHints, replay

pytestmark = pytest.mark.filterwarnings("error")  # what a policy in Python raises is reported as a warning

hints = st.builds(
    SessionHints,
    expected_return=st.sampled_from([-1.0, -1.0, -1.0, 0.1, 4.0, 300.0]),
    ends=st.sampled_from([False, False, False, True]),
)
turns = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=14),  # the prompt
    st.integers(0, 6),  # tokens generated
    st.sampled_from([0.0, 0.1, 1.0, 7.0, 400.0]),  # seconds since the turn before
    hints,
    st.integers(0, 2),  # requests that go on beside it
)


def hits(trace: BlockTrace, capacity: int, policy: Any) -> list[int]:
    (result,) = replay(trace, [ReplaySettings(capacity, policy=policy)])
    return (result.hit_tokens // trace.block_size).tolist()


@settings(deadline=None, max_examples=60)
@given(trace=block_traces(max_requests=50), capacity=st.integers(1, 30))
def test_a_log_is_served_as_by_the_twin(trace: BlockTrace, capacity: int) -> None:
    assert hits(trace, capacity, "gittins") == hits(trace, capacity, GittinsTwin(capacity, 1))


@settings(deadline=None, max_examples=60)
@given(served=st.lists(turns, max_size=50), num_blocks=st.integers(10, 40), block_size=st.integers(1, 3))
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_overlapping_requests_with_hints_are_served_as_by_the_twin(
    index: Any, served: list[Any], num_blocks: int, block_size: int
) -> None:
    def serve(policy: Any) -> list[Any]:
        cache = PrefixCache(num_blocks, block_size, index=index, policy=policy, manual_clock=True)
        now, seen = 0.0, []
        running: list[Any] = []
        for prompt, num_generated, pause, hint, beside in served:
            now += pause
            cache.set_time(now)
            while len(running) > beside:
                running.pop(0).release()
            sequence = cache.begin(prompt, hints=hint)
            seen.append(sequence.num_cached_tokens)
            sequence.append([1] * num_generated)
            running.append(sequence)
            try:
                sequence.allocate(sequence.num_tokens)
            except OutOfBlocks:
                continue
            sequence.commit(sequence.num_tokens)
        for sequence in running:
            sequence.release()
        return [*seen, cache.num_cached_blocks, cache.dump()]

    assert serve("gittins") == serve(GittinsTwin(num_blocks, block_size))


def test_a_real_trace_is_served_as_by_the_twin() -> None:
    trace = excerpt("mooncake_conversation.head").select(slice(0, 120))
    assert hits(trace, 400, "gittins") == hits(trace, 400, GittinsTwin(400, 1))
