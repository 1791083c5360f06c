from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.block_traces import block_traces, excerpt
from tests.cache.offline_twin import clairvoyant_hits, lru_hits

from caudex.cache.block_trace import BlockTrace
from caudex.cache.clairvoyant import clairvoyant


@settings(deadline=None, max_examples=300)
@given(block_traces())
def test_every_request_equals_a_simulated_oracle(trace: BlockTrace) -> None:
    for bound in clairvoyant(trace, range(20)):
        assert bound.hit_blocks.tolist() == clairvoyant_hits(trace, bound.capacity)


def test_real_trace() -> None:
    trace = excerpt("mooncake_synthetic.head").select(slice(0, 60))
    for bound in clairvoyant(trace, [500, 1000]):
        assert bound.hit_blocks.tolist() == clairvoyant_hits(trace, bound.capacity)


def test_bounds_lru_on_a_real_trace() -> None:
    trace = excerpt("mooncake_conversation.head")
    for bound in clairvoyant(trace, [500, 2000, 8000]):
        assert bound.hit_tokens > sum(lru_hits(trace, bound.capacity)) * trace.block_size


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is -1"):
        clairvoyant(BlockTrace.from_paths([[1]], [5], 4), [10, -1])


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=30))
def test_ids_with_two_parents_do_no_harm(id_paths: list[list[int]]) -> None:
    trace = BlockTrace.from_paths(id_paths, [len(path) for path in id_paths], 1)
    for bound in clairvoyant(trace, [1, 3, 100]):
        assert 0.0 <= bound.hit_rate <= 1.0
