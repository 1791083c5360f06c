from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from caudex.trace.repeats import RepeatCounter


@given(st.lists(st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), max_size=40), max_size=8))
def test_every_occurrence_but_the_first_is_a_repeat(parts: list[list[int]]) -> None:
    counter, seen = RepeatCounter(), Counter[int]()
    for part in parts:
        for value in part:
            counter.add(value)
        seen.update(part)
        assert counter.repeats == seen.total() - len(seen)


def test_more_values_than_the_buffer_holds() -> None:
    values = np.random.default_rng(0).integers(0, 200_000, 150_000).tolist()
    counter = RepeatCounter()
    for value in values:
        counter.add(value)
    assert counter.repeats == len(values) - len(set(values))
