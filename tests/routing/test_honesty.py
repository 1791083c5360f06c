from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from caudex.routing import HonestyCheck


@given(st.integers(0, 1000))
def test_an_honest_worker_never_drifts(seed: int) -> None:
    rng, check = random.Random(seed), HonestyCheck()
    for _ in range(200):
        truth = rng.choice([0, 500, 2_000])
        assert not check.observe(0, int(truth * rng.uniform(0.7, 1.3)), truth)


def test_a_worker_that_restarted_drifts_and_others_do_not() -> None:
    check = HonestyCheck(window=20)
    drifted_after = next(i for i in range(100) if check.observe(0, 1_000, 0))
    assert drifted_after < 40
    assert not check.observe(1, 1_000, 0)
    check.forget(0)
    assert check.predicted_and_reported(0) == (0.0, 0.0)


def test_an_index_that_knows_nothing_of_a_hot_cache_drifts_too() -> None:
    check = HonestyCheck(window=20)
    assert any(check.observe(0, 0, 1_000) for _ in range(40))


def test_small_numbers_do_not_count() -> None:
    check = HonestyCheck(window=20, min_tokens=64)
    assert not any(check.observe(0, 40, 0) for _ in range(200))
