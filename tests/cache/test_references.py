"""The caches of other people's studies: the rules that tell them from ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.block_traces import block_traces, excerpt
from tests.cache.offline_twin import leading, paths

from caudex.cache import BlockTrace, ReplaySettings, replay
from caudex.cache.references import replay_reference


def serve(name: Any, capacity: int, *id_paths: list[int]) -> list[int]:
    """Blocks served to each of these requests, whose prompts end one token after their last block."""
    trace = BlockTrace.from_paths(list(id_paths), [len(path) + 1 for path in id_paths], 1)
    return replay_reference(trace, name, capacity).hit_blocks.tolist()


def test_a_block_queue_keeps_what_nobody_can_reach() -> None:
    """The first block goes, the one that builds on it stays, and is there when the first has come back."""
    assert serve("block_fifo", 4, [1], [3], [4], [1, 2], [6], [1], [1, 2])[-2:] == [0, 2]


def test_a_block_queue_does_not_look_at_hits() -> None:
    assert serve("block_fifo", 2, [1], [2], [1], [3], [1])[-1] == 0


@settings(deadline=None, max_examples=100)
@given(trace=block_traces(max_requests=60), capacity=st.integers(1, 30))
def test_a_block_queue_evicts_by_age_alone(trace: BlockTrace, capacity: int) -> None:
    born: dict[int, tuple[int, int]] = {}
    hits = []
    for serial, (ids, reusable) in enumerate(paths(trace)):
        hits.append(leading(ids[:reusable], born))
        kept = ids[:capacity]
        new = [(depth, block) for depth, block in enumerate(kept) if block not in born]
        while len(born) + len(new) > capacity:
            del born[min((block for block in born if block not in kept), key=lambda block: born[block])]
        born.update({block: (serial, -depth) for depth, block in new})
    assert replay_reference(trace, "block_fifo", capacity).hit_blocks.tolist() == hits


def test_a_leaf_goes_whole() -> None:
    assert serve("whole_leaves", 4, [1, 2, 3], [4, 5], [1, 2, 3])[-1] == 0


def test_the_rest_of_a_split_node_keeps_its_time() -> None:
    """[3] was last wanted before [5, 6] though the first half of its node was matched after."""
    assert serve("whole_leaves", 5, [1, 2, 3], [5, 6], [1, 2], [7], [5, 6, 8])[-1] == 2


def test_one_path_after_another_is_plain_lru() -> None:
    """Where no request leaves a path in its middle and every leaf has one block, whole leaves are single blocks."""
    trace = BlockTrace.from_paths([[i % 7] for i in range(50)] + [[i % 3] for i in range(20)], [2] * 70, 1)
    (lru,) = replay(trace, [ReplaySettings(4)])
    assert replay_reference(trace, "whole_leaves", 4).hit_blocks.tolist() == lru.hit_tokens.tolist()


@settings(deadline=None, max_examples=100)
@given(trace=block_traces(max_requests=60), capacity=st.integers(1, 30))
def test_whole_leaves_go_by_their_last_request(trace: BlockTrace, capacity: int) -> None:
    """Against single blocks: a leaf is a last block with all above it that no other path and no earlier end shares."""
    touched: dict[tuple[int, ...], int] = {}  # by path
    ends: set[tuple[int, ...]] = set()  # where a node ends
    hits = []
    for serial, (ids, reusable) in enumerate(paths(trace), start=1):
        kept = tuple(ids[:capacity])
        matched = next((n for n in range(len(kept), 0, -1) if kept[:n] in touched), 0)
        hits.append(min(matched, reusable))
        if matched:
            ends.add(kept[:matched])
        touched.update({kept[:n]: serial for n in range(1, matched + 1)})
        while len(touched) + len(kept) - matched > capacity:
            leaves = [p for p in touched if touched[p] < serial and not any(q[:-1] == p for q in touched)]
            leaf = min(leaves, key=lambda p: touched[p])
            ends.discard(leaf)
            del touched[leaf]
            while (leaf := leaf[:-1]) and leaf not in ends:
                del touched[leaf]
        touched.update({kept[:n]: serial for n in range(matched + 1, len(kept) + 1)})
        if kept:
            ends.add(kept)
    assert replay_reference(trace, "whole_leaves", capacity).hit_blocks.tolist() == hits


@pytest.mark.parametrize("name", ["block_fifo", "whole_leaves"])
def test_a_real_trace_hits_less_than_under_our_lru(name: Any) -> None:
    trace = excerpt("mooncake_conversation.head")
    (lru,) = replay(trace, [ReplaySettings(2000)])
    result = replay_reference(trace, name, 2000)
    assert 0.5 * lru.hit_rate < result.hit_rate <= lru.hit_rate
    assert result.hit_tokens == result.hit_blocks.sum() * trace.block_size


def test_bad_arguments_are_refused() -> None:
    trace = BlockTrace.from_paths([[1]], [2], 1)
    with pytest.raises(ValueError, match="no reference cache 'clock': choose one of block_fifo, whole_leaves"):
        replay_reference(trace, "clock", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity is 0"):
        replay_reference(trace, "block_fifo", 0)
