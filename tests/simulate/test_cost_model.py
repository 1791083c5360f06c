from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.simulate import (
    CostModelFile,
    FittedModel,
    Measurement,
    RooflineModel,
    StepWork,
    find_gpu,
    find_model,
    fit_model,
    read_cost_model,
)

works = st.builds(
    StepWork,
    st.integers(0, 8_000),
    st.floats(0, 1e7, allow_nan=False),
    st.integers(0, 200),
    st.floats(0, 1e6, allow_nan=False),
    st.floats(0, 1e6, allow_nan=False),
)
TRUTH = FittedModel(0.004, 5e-5, 2e-9, 2e-4, 3e-8, 1e-3, 1e-6, 1e-7)


def measurement(rng: np.random.Generator) -> Measurement:
    """A prefill as a client sees it, or a step of decoding, of a server that is `TRUTH` but for 2 % of noise."""
    if rng.random() < 0.3:
        decodes = int(rng.integers(1, 64))
        shared = int(rng.integers(0, 1_000))
        context = decodes * 1_000.0
        distinct = context - (decodes - 1) * shared
        work = Measurement(seconds=1.0, steps=1, decodes=decodes, context_tokens=context, distinct_tokens=distinct)
    else:
        tokens, cached = (int(n) for n in rng.integers(1, 4_000, 2))
        pairs = tokens * (cached + (tokens + 1) / 2)
        work = Measurement(
            seconds=1.0,
            steps=-(-tokens // 512),
            prefill_tokens=tokens,
            prefill_pairs=pairs,
            requests=1,
            prompt_tokens=tokens + cached,
        )
    return with_seconds(work, predicted(TRUTH, work) * rng.uniform(0.98, 1.02))


def predicted(model: FittedModel, measured: Measurement) -> float:
    coefficients = [getattr(model, name) for name in model.__struct_fields__]
    return float(np.dot(coefficients, measured.work()))


def with_seconds(measured: Measurement, seconds: float) -> Measurement:
    fields = {name: getattr(measured, name) for name in measured.__struct_fields__}
    return Measurement(**fields | {"seconds": seconds})


@given(works, works)
def test_more_work_never_takes_less_time(a: StepWork, b: StepWork) -> None:
    both = StepWork(*(x + y for x, y in zip(a, b, strict=True)))  # type: ignore[arg-type]
    for model in (RooflineModel(find_model("Qwen3-8B"), find_gpu("L40S")), TRUTH):
        assert model.step_seconds(both) >= max(model.step_seconds(a), model.step_seconds(b))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_a_fit_finds_what_the_measurements_were_made_of_in_spite_of_hiccups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    measured = [measurement(rng) for _ in range(40)]
    for i in rng.choice(40, 4, replace=False).tolist():
        measured[i] = with_seconds(measured[i], measured[i].seconds * 1.5)
    fit = fit_model(measured)
    unseen = [measurement(rng) for _ in range(100)]
    errors = [abs(predicted(fit.model, m) / m.seconds - 1) for m in unseen]
    assert np.median(errors) < 0.05
    assert fit.worst_error > 0.2
    assert all(getattr(fit.model, name) >= 0 for name in fit.model.__struct_fields__)


def test_too_little_to_fit_to_is_refused() -> None:
    with pytest.raises(ValueError, match="at least five"):
        fit_model([Measurement(seconds=0.1, steps=1, prefill_tokens=1)])
    with pytest.raises(ValueError, match="no cost of prefill"):
        fit_model([Measurement(seconds=0.1, steps=1, decodes=n) for n in range(1, 9)])
    with pytest.raises(ValueError, match="no number"):
        fit_model([Measurement(seconds=float("nan"), prefill_tokens=n) for n in range(1, 9)])


def test_a_cost_model_is_kept_in_a_file() -> None:
    rng = np.random.default_rng(0)
    kept = CostModelFile(model=TRUTH, capacity_tokens=65_536, measurements=[measurement(rng)])
    assert read_cost_model(kept.encode()) == kept


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "not a cost model"),
        (b"{", "not a cost model"),
        (b'{"version": 2, "model": {"overhead_seconds": 1}}', "not a cost model"),
        (CostModelFile(version=2, model=TRUTH).encode(), "version 2"),
        (CostModelFile(model=FittedModel(-1.0, 1e-4, 0, 0, 0)).encode(), "not below 0"),
        (CostModelFile(model=FittedModel(0.01, 0.0, 0, 0, 0)).encode(), "above 0 for prefill"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cost_model(content)
