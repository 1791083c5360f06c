"""The tree of a log's distinct blocks, against a set of prefixes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex import _core
from caudex.cache.block_trace import BlockTrace
from caudex.cache.trace_builder import TraceBuilder

Log = list[tuple[str, list[int]]]

logs = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=20)), max_size=25)


def fed(log: Log, kind: str, batch: int, unit: int = 1) -> tuple[TraceBuilder, list[int]]:
    """Build from prompts (of units), in batches; return what was known of each."""
    builder = TraceBuilder(kind, unit)  # type: ignore[arg-type]
    known: list[int] = []
    for start in range(0, len(log), batch):
        prompts = [prompt for _, prompt in log[start : start + batch]]
        values = np.array(
            [-1, *(unit for prompt in prompts for unit in prompt)]
        )  # a slice does not begin at its values' 0
        offsets = np.concatenate([[1], 1 + np.cumsum([len(prompt) for prompt in prompts])])
        lengths = [unit * len(prompt) for prompt in prompts]
        known += builder.add(values, offsets, lengths, [name for name, _ in log[start : start + batch]]).tolist()
    return builder, known


def prefixes(name: str, prompt: list[int], size: int) -> Iterator[tuple[object, ...]]:
    """The blocks of a prompt: each is all that comes before it and itself."""
    return ((name, *prompt[:end]) for end in range(size, len(prompt) + 1, size))


@settings(deadline=None, max_examples=200)
@given(logs, st.sampled_from(["tokens", "blocks"]), st.integers(1, 7), st.integers(1, 5))
def test_blocks_are_the_distinct_prefixes(log: Log, kind: str, batch: int, size: int) -> None:
    trace = fed(log, kind, batch)[0].build(size)
    numbers: dict[tuple[object, ...], int] = {}
    expected = [[numbers.setdefault(block, len(numbers)) for block in prefixes(*request, size)] for request in log]
    ids, offsets = trace.block_ids()
    found = [ids[offsets[i] : offsets[i + 1]].tolist() for i in range(len(log))]
    assert [len(path) for path in found] == [len(path) for path in expected]
    # The numbers may differ from order of appearance where a larger block ends later than another that began later.
    renamed = dict(zip((n for path in found for n in path), (n for path in expected for n in path), strict=True))
    assert [[renamed[n] for n in path] for path in found] == expected
    assert len(set(renamed.values())) == len(renamed) == len(numbers) == trace.num_distinct_blocks


@settings(deadline=None, max_examples=100)
@given(logs, st.sampled_from(["tokens", "blocks"]), st.integers(1, 7), st.integers(1, 3))
def test_what_is_known_is_the_longest_prefix_of_any_before(log: Log, kind: str, batch: int, unit: int) -> None:
    unit = 1 if kind == "tokens" else unit
    builder, known = fed(log, kind, batch, unit)
    seen: set[tuple[object, ...]] = set()
    for request, count in zip(log, known, strict=True):
        blocks = list(prefixes(*request, 1))
        assert count == unit * next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
    assert builder.num_distinct_tokens == unit * len(seen)


@settings(deadline=None, max_examples=100)
@given(logs, st.integers(1, 3), st.data())
def test_reuse_within_looks_at_the_same_label_only(log: Log, size: int, data: st.DataObject) -> None:
    trace = fed(log, "tokens", 5)[0].build(size)
    labels = data.draw(st.lists(st.integers(-2, 2), min_size=len(log), max_size=len(log)))
    seen: set[tuple[object, ...]] = set()
    for request, label, count in zip(log, labels, trace.reuse_within(labels).tolist(), strict=True):
        blocks = [(label, *block) for block in prefixes(*request, size)]
        known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        assert count == min(known, max(len(request[1]) - 1, 0) // size)
        seen.update(blocks)


@settings(deadline=None, max_examples=100)
@given(logs, st.integers(1, 3), st.data())
def test_blocks_in_flight_are_those_whose_first_request_is_not_done(log: Log, size: int, data: st.DataObject) -> None:
    arrivals = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(log), max_size=len(log))), dtype=np.float64)
    done = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(log), max_size=len(log))), dtype=np.float64)
    trace = fed(log, "tokens", 5)[0].build(size, timestamps=arrivals)
    served = np.array([data.draw(st.integers(0, length)) for length in trace.num_full_blocks.tolist()], dtype=np.int64)
    first: dict[tuple[object, ...], int] = {}
    expected = 0
    for i, request in enumerate(log):
        for depth, block in enumerate(prefixes(*request, size)):
            by = first.setdefault(block, i)
            expected += depth < served[i] and by != i and arrivals[i] < done[by]
    assert trace.blocks_in_flight(done, served) == expected


@settings(deadline=None, max_examples=200)
@given(logs, st.integers(1, 3), st.integers(0, 12))
def test_shared_runs_are_what_the_same_requests_share(log: Log, size: int, least: int) -> None:
    trace = fed(log, "tokens", 5)[0].build(size)
    paths = [list(prefixes(*request, size)) for request in log]
    users: dict[tuple[object, ...], list[int]] = {}
    for i, path in enumerate(paths):
        for block in path:
            users.setdefault(block, []).append(i)
    expected = set()
    for start, first in {(depth, block) for path in paths for depth, block in enumerate(path)}:
        sharing = users[first]
        if start > 0 and users[paths[sharing[0]][start - 1]] == sharing:
            continue  # it goes on from the block before
        path = paths[sharing[0]]
        end = next((d for d in range(start, len(path)) if users[path[d]] != sharing), len(path))
        weight = sum(len(paths[i]) - start for i in sharing)
        if len(sharing) >= 2 and weight >= least:
            expected.add((start, end, len(sharing), weight, sharing[0]))
    runs = trace.shared_runs(least)
    found = list(zip(*(column.tolist() for column in runs[1:]), strict=True))
    assert len(found) == len(set(found))
    assert set(found) == expected
    for parent, start, sample in zip(runs.parents.tolist(), runs.starts.tolist(), runs.samples.tolist(), strict=True):
        if parent < 0:
            assert start == 0
        else:
            assert runs.ends[parent] == start
            assert paths[sample][start - 1] == paths[runs.samples[parent]][start - 1]


def test_repeating_a_log_costs_16_bytes_a_request() -> None:
    prompt = np.arange(100_000, dtype=np.int32)
    builder = TraceBuilder("tokens")
    offsets = np.array([0, len(prompt)])
    builder.add(prompt, offsets, [len(prompt)])
    before = builder.num_bytes
    for _ in range(1000):
        assert builder.add(prompt, offsets, [len(prompt)]).tolist() == [len(prompt)]
    assert builder.num_bytes - before <= 16 * 1024


def test_a_distinct_block_of_16_tokens_costs_at_most_40_bytes() -> None:
    random = np.random.default_rng(0)
    builder = TraceBuilder("tokens")
    for _ in range(100):
        prompts = random.integers(0, 150_000, 10 * 4000, dtype=np.int32)
        builder.add(prompts, np.arange(11) * 4000, [4000] * 10)
    assert builder.num_distinct_tokens > 3_999_000
    assert builder.num_bytes <= 40 * builder.num_distinct_tokens / 16


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 1), max_size=40), max_size=12), st.data())
def test_ids_of_any_size_are_told_apart(prompts: list[list[int]], data: st.DataObject) -> None:
    """Prompts that leave others somewhere, with another token there."""
    for prompt in list(prompts):
        if prompt:
            at = data.draw(st.integers(0, len(prompt) - 1))
            prompts.append([*prompt[:at], prompt[at] ^ 1, *prompt[at + 1 :]])
    known = fed([("", prompt) for prompt in prompts], "tokens", 4)[1]
    seen: set[tuple[object, ...]] = set()
    for prompt, count in zip(prompts, known, strict=True):
        blocks = list(prefixes("", prompt, 1))
        assert count == next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)


@pytest.mark.parametrize(
    ("kind", "unit", "size", "message"),
    [("tokens", 16, 16, "unit is 16"), ("blocks", 0, 16, "unit is 0"), ("blocks", 64, 96, "a multiple of 64")],
)
def test_sizes_that_the_log_cannot_tell_are_refused(kind: str, unit: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceBuilder(kind, unit).build(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offsets", "lengths"), [([0, 9], [9]), ([0, 1, 2], [2]), ([-1, 2], [2]), ([2, 1], [1]), ([0, 2], [-1])]
)
def test_requests_that_do_not_fit_their_values_are_refused(offsets: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="offsets"):
        TraceBuilder("tokens").add(np.array([1, 2], dtype=np.int32), np.array(offsets), lengths)


def test_an_id_behind_two_paths_is_two_blocks() -> None:
    trace = BlockTrace.from_paths([[1, 2, 3], [7, 2, 3], [1, 2, 3]], [3, 3, 3], 1)
    assert trace.num_distinct_blocks == 6
    assert trace.reuse_within([0, 0, 0]).tolist() == [0, 0, 2]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(0, 5) | st.integers(-(2**63), 2**63 - 1), max_size=12), max_size=25))
def test_blocks_and_ids_of_a_hash_trace_are_counted_apart(paths: list[list[int]]) -> None:
    counted = _core.DistinctIds()
    for path in paths:
        counted.add(np.array(path, dtype=np.int64), np.array([0, len(path)]))
    assert counted.num_ids == len({block for path in paths for block in path})
    assert counted.num_blocks == len({block for path in paths for block in prefixes("", path, 1)})
