from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.simulate import FittedModel, RooflineModel, find_gpu, find_model, fit_cost_model, fit_steps
from caudex.simulate.cost_model import StepWork

works = st.builds(
    StepWork,
    st.integers(0, 8_000),
    st.floats(0, 1e7, allow_nan=False),
    st.integers(0, 200),
    st.floats(0, 1e6, allow_nan=False),
)


@given(works, works)
def test_more_work_never_takes_less_time(a: StepWork, b: StepWork) -> None:
    model = RooflineModel(find_model("Qwen3-8B"), find_gpu("L40S"))
    both = StepWork(
        a.prefill_tokens + b.prefill_tokens,
        a.prefill_pairs + b.prefill_pairs,
        a.decodes + b.decodes,
        a.context_tokens + b.context_tokens,
    )
    assert model.step_seconds(both) >= max(model.step_seconds(a), model.step_seconds(b))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_fit_finds_the_steps_it_was_made_of(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = FittedModel(0.004, 5e-5, 2e-9, 2e-4, 3e-8)
    samples = [
        StepWork(int(p), float(p) * p / 2, int(d), float(d) * 1_000)
        for p, d in zip(rng.integers(0, 4_000, 40), rng.integers(0, 64, 40), strict=True)
    ]
    noisy = [truth.step_seconds(work) * rng.uniform(0.98, 1.02) for work in samples]
    fitted = fit_cost_model(samples, noisy)
    errors = [abs(fitted.step_seconds(work) / truth.step_seconds(work) - 1) for work in samples]
    assert np.median(errors) < 0.05


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="at least five"):
        fit_cost_model([StepWork(1, 1, 0, 0)], [0.1])


def test_measured_steps_are_read_from_json() -> None:
    steps = [{"seconds": 0.01 + 1e-4 * n, "prefill_tokens": n} for n in (10, 100, 500, 1_000)]
    steps += [{"seconds": 0.01 + 1e-3 * b, "decodes": b, "context_tokens": 100.0 * b} for b in (1, 4, 8)]
    model = fit_steps(json.dumps(steps).encode())
    assert model.step_seconds(StepWork(2_000, 0.0, 0, 0.0)) == pytest.approx(0.21, rel=0.05)
    with pytest.raises(ValueError, match="measured steps"):
        fit_steps(b'[{"seconds": "x"}]')
