"""Workloads written out by hand."""

from __future__ import annotations

import numpy as np

from caudex.simulate import Workload


def workload_of(requests: list[tuple[float, list[int], int, int]], block_size: int = 16) -> Workload:
    """Requests as (arrival, block ids, input length, output length)."""
    arrivals, paths, inputs, outputs = zip(*requests, strict=True)
    return Workload(
        np.array([i for path in paths for i in path], dtype=np.int32),
        np.cumsum([0, *map(len, paths)]),
        np.array(arrivals, dtype=np.float64),
        np.array(inputs, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
        block_size,
        [None] * len(requests),
    )
