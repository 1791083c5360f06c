"""What is measured agrees with a slow, obvious reckoning, with the caches' own replay, and with published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.analysis.analyze import analyze
from caudex.analysis.measure import Measured, Meter, in_flight_tokens
from caudex.cache.hit_curve import hit_curve
from caudex.trace.table import TraceInfo, schema_of

prompts = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=24), min_size=1, max_size=12)


def measure(rows: list[dict[str, Any]], block_size: int, turn_ends: list[Any] | None = None) -> Measured:
    schema = schema_of(TraceInfo("tokens"))
    full = [dict.fromkeys(schema.names) | {"input_length": len(row["token_ids"]), **row} for row in rows]
    meter = Meter(TraceInfo("tokens"), block_size, turn_ends or [])
    meter.add(pa.RecordBatch.from_pylist(full, schema=schema))
    return meter.measured()


def longest_repeated(prompts: list[list[int]], index: int) -> int:
    """The twin: the longest common prefix with any earlier prompt, compared token by token."""
    best = 0
    for earlier in prompts[:index]:
        shared = 0
        while shared < min(len(earlier), len(prompts[index])) and earlier[shared] == prompts[index][shared]:
            shared += 1
        best = max(best, shared)
    return best


@given(prompts, st.sampled_from([1, 2, 4]))
@settings(max_examples=150, deadline=None)
def test_hits_are_those_of_comparing_all_prompts(log: list[list[int]], size: int) -> None:
    measured = measure([{"token_ids": prompt} for prompt in log], size)
    for index, prompt in enumerate(log):
        shared = longest_repeated(log, index)
        assert measured.exact_tokens[index] == min(shared, max(len(prompt) - 1, 0))
        assert measured.hit_tokens[index] == min(shared // size, max(len(prompt) - 1, 0) // size) * size


@given(prompts, st.sampled_from([1, 2, 4]))
@settings(max_examples=60, deadline=None)
def test_the_curve_of_the_real_cache_ends_at_the_same_rate(log: list[list[int]], size: int) -> None:
    measured = measure([{"token_ids": prompt} for prompt in log], size)
    assert hit_curve(measured.trace).ceiling == pytest.approx(measured.rate(measured.hit_tokens))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=12)), min_size=1, max_size=14))
@settings(max_examples=80, deadline=None)
def test_in_session_hits_come_from_the_same_session(log: list[tuple[str, list[int]]]) -> None:
    measured = measure([{"session": session, "token_ids": prompt} for session, prompt in log], 1)
    for index, (session, prompt) in enumerate(log):
        own = [p for s, p in log[: index + 1] if s == session]
        expected = min(longest_repeated(own, len(own) - 1), max(len(prompt) - 1, 0))
        assert measured.in_session_tokens[index] == expected


def test_output_is_served_once_it_is_cached() -> None:
    end = np.asarray([9], dtype=np.int32)
    first, output, question = [1, 2, 3, 4], [5, 6, 7, 9], [8, 8, 8]
    rows = [{"session": "s", "token_ids": first}, {"session": "s", "token_ids": first + output + question}]
    measured = measure(rows, 1, [end])
    assert measured.exact_tokens.tolist() == [0, 4]
    assert measured.with_output_tokens.tolist() == [0, 8]


def test_output_in_text_is_found_without_a_vocabulary(tmp_path: Path) -> None:
    """Four bytes a token: the prompt's last token is another once the answer follows it."""
    answer = "It is about eleven kilometres deep at the deepest place that anybody has found so far. " * 4
    turns = [{"role": "user", "content": "How deep is the sea, would you say?"}]
    longer = [*turns, {"role": "assistant", "content": answer}, {"role": "user", "content": "Thank you for that."}]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"messages": m, "session_id": "s"}) + "\n" for m in (turns, longer)))
    found = analyze(log, breakers=False, policies=["lru"])
    served = (found.repetition.with_output_hit_rate - found.repetition.hit_rate) * found.prompt_tokens
    assert served >= len(answer) // 4 - 2 * found.block_size


def test_namespaces_never_share() -> None:
    prompt = list(range(8))
    rows = [{"salt": "a", "token_ids": prompt}, {"salt": "b", "token_ids": prompt}, {"salt": "a", "token_ids": prompt}]
    assert measure(rows, 1).exact_tokens.tolist() == [0, 0, 7]


def test_tokens_computed_twice_at_once() -> None:
    prompt = list(range(100))
    at = [{"token_ids": prompt, "timestamp": time} for time in (0.0, 0.5, 5.0)]
    measured = measure(at, 10)
    assert in_flight_tokens(measured, prefill_rate=100.0) == 90
    assert in_flight_tokens(measured, prefill_rate=1000.0) == 0


def test_hash_ids_whose_parents_disagree_do_not_match(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1, "input_length": 48, "hash_ids": [1, 2, 3], "block_size": 16},
        {"timestamp": 2, "input_length": 48, "hash_ids": [7, 2, 3], "block_size": 16},
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = analyze(tmp_path / "log.jsonl", policies=["lru"])
    assert found.infinite_hit_rate == 0
    assert any("after different parents" in message for message in found.read.warnings)


FIGURES = {"mooncake_conversation": 0.3734, "mooncake_synthetic": 0.6504, "kvct_small": 0.9620}
AT_CAPACITY = [
    ("mooncake_conversation", 2_000, 0.056, 0.254),
    ("mooncake_conversation", 10_000, 0.219, 0.373),
    ("mooncake_conversation", 50_000, 0.363, 0.373),
    ("mooncake_synthetic", 5_000, 0.290, 0.535),
    ("kvct_small", 10_000, 0.754, 0.835),
]


@pytest.mark.parametrize("name", FIGURES)
def test_published_figures_of_real_traces(name: str, traces: Path) -> None:
    capacities = [capacity for trace, capacity, _, _ in AT_CAPACITY if trace == name]
    found = analyze(traces / "hash" / f"{name}.jsonl.gz", capacities=capacities, policies=["lru"])
    assert round(found.infinite_hit_rate, 4) == FIGURES[name]
    rates = {(row.policy, row.capacity_blocks): row.hit_rate for row in found.curve}
    for trace, capacity, lru, bound in AT_CAPACITY:
        if trace == name:
            assert round(rates["lru", capacity], 3) == lru
            assert round(rates["clairvoyant", capacity], 3) == bound
