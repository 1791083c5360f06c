from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache.block_traces import block_traces
from tests.cache.offline_twin import paths

from caudex.cache.block_trace import BlockTrace

GOOD = {"block_ids": [1, 2, 3], "offsets": [0, 2, 3], "input_lengths": [5, 4], "block_size": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": [0, 3]}, "offsets does not fit 2 requests"),
        ({"offsets": [0, 2, 2]}, "offsets must rise"),
        ({"offsets": [0, 4, 3]}, "offsets must rise"),
        ({"offsets": [-1, 2, 3]}, "offsets must rise"),
        ({"input_lengths": [5, -4]}, r"input_lengths\[1\] is -4"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_ids": [1.5, 2.0, 3.0]}, "block_ids holds float64"),
        ({"block_ids": [[1, 2, 3]]}, "2 dimensions"),
        ({"timestamps": [0.0]}, "timestamps does not fit 2"),
        ({"timestamps": [0.0, float("nan")]}, r"timestamps\[1\] is nan"),
        ({"tenants": [1, 2, 3]}, "tenants does not fit 2"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockTrace.from_arrays(**{**GOOD, **change})  # type: ignore[arg-type]


def test_a_partial_last_block_is_not_full() -> None:
    assert BlockTrace.from_arrays(**GOOD).num_full_blocks.tolist() == [1, 1]  # type: ignore[arg-type]


@given(block_traces(), st.data())
def test_select_keeps_what_it_is_asked_for(trace: BlockTrace, data: st.DataObject) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(trace), max_size=len(trace))), dtype=bool)
    chosen = trace.select(mask)
    kept = [i for i in range(len(trace)) if mask[i]]
    assert len(chosen) == len(kept)
    before, after = paths(trace), paths(chosen)
    for new, old in enumerate(kept):
        assert after[new] == before[old]
        assert chosen.input_lengths[new] == trace.input_lengths[old]
        assert chosen.timestamps is not None
        assert trace.timestamps is not None
        assert chosen.timestamps[new] == trace.timestamps[old]
