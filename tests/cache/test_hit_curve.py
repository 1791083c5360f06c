from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.block_traces import block_traces, excerpt
from tests.cache.offline_twin import lru_hits

from caudex.cache.block_trace import BlockTrace
from caudex.cache.hit_curve import hit_curve, hit_curves


@settings(deadline=None)
@given(block_traces())
def test_every_capacity_equals_a_simulated_cache(trace: BlockTrace) -> None:
    curve = hit_curve(trace)
    for capacity in range(trace.num_distinct_blocks + 2):
        served = sum(lru_hits(trace, capacity)) * trace.block_size
        assert curve.hit_rate(capacity) == pytest.approx(served / max(trace.prompt_tokens, 1))
    assert curve.ceiling == pytest.approx(curve.hit_rate(10**9))


@settings(deadline=None)
@given(block_traces(), st.data(), st.integers(0, 30))
def test_groups_share_one_cache(trace: BlockTrace, data: st.DataObject, capacity: int) -> None:
    labels = data.draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=len(trace), max_size=len(trace)))
    curves = hit_curves(trace, labels)
    assert set(curves) == set(labels)
    hits = lru_hits(trace, capacity)
    for label, curve in curves.items():
        expected = sum(h for h, of in zip(hits, labels, strict=True) if of == label) * trace.block_size
        tokens = sum(n for n, of in zip(trace.input_lengths.tolist(), labels, strict=True) if of == label)
        assert curve.prompt_tokens == tokens
        assert curve.hit_rate(capacity) * tokens == pytest.approx(expected)


@pytest.mark.parametrize("name", ["mooncake_conversation.head", "mooncake_synthetic.head"])
def test_real_trace(name: str) -> None:
    trace = excerpt(name)
    curve = hit_curve(trace)
    capacities = np.array([300, 1000, 3000, 10000])
    expected = [sum(lru_hits(trace, c)) * trace.block_size / trace.prompt_tokens for c in capacities.tolist()]
    assert curve.hit_rate(capacities) == pytest.approx(expected, abs=0)


@given(block_traces(), st.just(0.0) | st.floats(1e-6, 1.0))
def test_capacity_for_is_the_least_that_suffices(trace: BlockTrace, fraction: float) -> None:
    curve = hit_curve(trace)
    capacity = curve.capacity_for(fraction)
    assert curve.hit_rate(capacity) >= fraction * curve.ceiling - 1e-12
    if capacity > 0:
        assert curve.hit_rate(capacity - 1) < fraction * curve.ceiling


def test_capacity_for_refuses_what_is_no_fraction() -> None:
    with pytest.raises(ValueError, match=r"fraction is 1\.5"):
        hit_curve(BlockTrace.from_paths([[1]], [5], 4)).capacity_for(1.5)


def test_labels_must_cover_the_trace() -> None:
    with pytest.raises(ValueError, match="labels has 2 entries"):
        hit_curves(BlockTrace.from_paths([[1]], [5], 4), ["a", "b"])


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=30))
def test_ids_with_two_parents_do_no_harm(id_paths: list[list[int]]) -> None:
    trace = BlockTrace.from_paths(id_paths, [len(path) for path in id_paths], 1)
    assert 0.0 <= hit_curve(trace).ceiling <= 1.0
