"""Request logs of prefix hashes, as gzipped JSON Lines, for the benchmarks."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from caudex.cache import BlockTrace


class _Request(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int = 0


def load(path: Path) -> BlockTrace:
    """Read a log in the fields of the Mooncake traces, with `block_size` on each line."""
    return BlockTrace.from_arrays(**load_arrays(path))


def load_arrays(path: Path) -> dict[str, Any]:
    """Read the same log as the arrays that a BlockTrace is built from."""
    decoder = msgspec.json.Decoder(_Request)
    with gzip.open(path) as lines:
        requests = [decoder.decode(line) for line in lines]
    block_size = requests[0].block_size
    if any(request.block_size != block_size for request in requests):
        raise ValueError(f"{path} mixes block sizes, or does not say which it has")
    paths = [np.asarray(request.hash_ids, dtype=np.int64) for request in requests]
    return {
        "block_ids": np.concatenate(paths),
        "offsets": np.concatenate([[0], np.cumsum([len(path) for path in paths])]),
        "input_lengths": np.array([request.input_length for request in requests]),
        "block_size": block_size,
        "timestamps": np.array([request.timestamp for request in requests]) / 1000.0,
        "output_lengths": np.array([request.output_length for request in requests]),
    }
