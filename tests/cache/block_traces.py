"""Request logs for tests: random prefix trees, and the shipped excerpts of real ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from caudex.cache.block_trace import BlockTrace

DATA = Path(__file__).parent / "data"


@st.composite
def block_traces(draw: st.DrawFn, max_requests: int = 40, max_blocks: int = 8, branching: int = 3) -> BlockTrace:
    """Draw requests as random walks down one tree, so that every id has one parent."""
    block_size = draw(st.integers(1, 4))
    node_ids: dict[tuple[int, ...], int] = {}
    walks = draw(st.lists(st.lists(st.integers(0, branching - 1), max_size=max_blocks), max_size=max_requests))
    id_paths = [[node_ids.setdefault(tuple(walk[: n + 1]), len(node_ids)) for n in range(len(walk))] for walk in walks]
    lengths = [
        max(len(walk) * block_size - draw(st.integers(0, block_size - 1)), 0) for walk in walks
    ]  # 0: the last block is full
    gaps = draw(st.lists(st.floats(0.0, 100.0), min_size=len(walks), max_size=len(walks)))
    outputs = draw(st.lists(st.integers(0, 500), min_size=len(walks), max_size=len(walks)))
    return BlockTrace.from_paths(id_paths, lengths, block_size, timestamps=np.cumsum(gaps), output_lengths=outputs)


def excerpt(name: str) -> BlockTrace:
    """Load a shipped excerpt (see data/README.md) of a real trace."""
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as lines:
        requests = [json.loads(line) for line in lines]
    return BlockTrace.from_paths(
        [request["hash_ids"] for request in requests],
        [request["input_length"] for request in requests],
        requests[0]["block_size"],
        timestamps=np.array([request["timestamp"] for request in requests]) / 1000.0,
        output_lengths=[request["output_length"] for request in requests],
    )
