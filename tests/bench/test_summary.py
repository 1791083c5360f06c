"""From records to figures."""

from __future__ import annotations

import pytest

from caudex.bench.client import Record
from caudex.bench.summary import is_hot, percentile, summarize


def record(ttft: float, prompt: int, cached: int | None, *, first: bool = False, **fields) -> Record:
    return Record(first, ttft, ttft + 1, [0.1, 0.2], prompt, cached, 3, **fields)


def test_sums_and_rates() -> None:
    records = [record(1.0, 100, 0), record(0.1, 100, 90), record(0.3, 100, 60), record(9, 0, None, error="boom")]
    summary = summarize("scene", False, records, [2.0, 4.0])
    assert (summary.requests, summary.errors) == (4, 1)
    assert (summary.prompt_tokens, summary.cached_tokens) == (300, 150)
    assert summary.hit_rate == 0.5
    assert (summary.ttft_p50_cold, summary.ttft_p50_hot) == (1.0, 0.3)
    assert summary.output_tokens_per_second == pytest.approx(9 / 6)
    assert summary.wall == 4.0


def test_a_server_that_tells_no_cached_tokens() -> None:
    records = [record(1.0, 100, None, first=True), record(0.1, 100, None)]
    summary = summarize("scene", False, records, [1.0])
    assert summary.cached_tokens is None
    assert summary.hit_rate is None
    assert (summary.ttft_p50_cold, summary.ttft_p50_hot) == (1.0, 0.1)


def test_nothing_but_errors() -> None:
    summary = summarize("scene", True, [Record(True, error="x")], [1.0])
    assert (summary.errors, summary.ttft_p50, summary.hit_rate) == (1, None, None)


def test_half_cached_is_hot() -> None:
    assert is_hot(record(1, 100, 50, first=True))
    assert not is_hot(record(1, 100, 49))


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 3), (0.9, 5), (1.0, 5)])
def test_percentile(share: float, value: float) -> None:
    assert percentile([5, 3, 1, 2, 4], share) == value
    assert percentile([], share) is None
