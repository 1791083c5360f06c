"""What arrives: requests as paths of block ids, with times and lengths."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

_MAX_TOKEN_ID = 2**31 - 2


class _HashRequest(msgspec.Struct):
    hash_ids: list[int]
    input_length: int
    output_length: int = 1
    timestamp: float = 0.0
    block_size: int = 512
    session_id: str | int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    `paths[i]` are the ids of request i's whole blocks, chained: equal ids mean equal blocks with equal blocks before
    them. They are dense int32, so that the cache takes them for tokens, one a block; `keys(i)` are the same for
    routing.
    """

    paths: list[NDArray[np.int32]]
    arrivals: NDArray[np.float64]
    input_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    block_size: int
    sessions: list[str | None]

    def __len__(self) -> int:
        return len(self.paths)

    def keys(self, i: int) -> NDArray[np.uint64]:
        return self.paths[i].astype(np.uint64)

    @property
    def partial_block_id(self) -> int:
        """An id that no whole block has."""
        return _MAX_TOKEN_ID

    def faster(self, factor: float) -> Workload:
        """The same requests, arriving `factor` times as fast."""
        if not factor > 0:
            raise ValueError(f"the speed-up is {factor}; it must be above 0")
        return replace(self, arrivals=self.arrivals / factor)

    def open_loop(self, rate: float, seed: int) -> Workload:
        """The same requests in the same order, arriving as a Poisson process of `rate` a second."""
        if not rate > 0:
            raise ValueError(f"the rate is {rate} requests a second; it must be above 0")
        gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(self))
        return replace(self, arrivals=np.cumsum(gaps))

    def infinite_cache_hits(self) -> int:
        """Tokens that one cache without end would serve, requests one after another."""
        seen: set[int] = set()
        hits = 0
        for path, length in zip(self.paths, self.input_lengths, strict=True):
            ids = path.tolist()
            limit = min(len(ids), (int(length) - 1) // self.block_size)
            matched = next((i for i in range(limit) if ids[i] not in seen), limit)
            hits += matched * self.block_size
            seen.update(ids)
        return hits


def read_hash_trace(path: Path, limit: int | None = None) -> Workload:
    """Reads a hash trace (Mooncake, kv-cache-tester): JSON Lines, gzipped or not, with `hash_ids`, `input_length`,
    `output_length`, `timestamp` in milliseconds, `block_size`. ValueError names the line that is not so."""
    rows: list[_HashRequest] = []
    decoder = msgspec.json.Decoder(_HashRequest)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(rows) >= limit:
                break
            if line.strip():
                rows.append(_decoded(decoder, line, path, number))
    if not rows:
        raise ValueError(f"{path} has no requests")
    sizes = {row.block_size for row in rows}
    if len(sizes) > 1:
        raise ValueError(f"{path} mixes block sizes {sorted(sizes)}")
    return _workload(rows)


def _decoded(decoder: msgspec.json.Decoder[_HashRequest], line: bytes, path: Path, number: int) -> _HashRequest:
    try:
        row = decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error
    if row.input_length < 1 or row.output_length < 0 or row.block_size < 1:
        raise ValueError(f"{path}, line {number}: lengths must be positive")
    return row


def _workload(rows: list[_HashRequest]) -> Workload:
    rows = sorted(rows, key=lambda row: row.timestamp)
    block_size = rows[0].block_size
    dense: dict[int, int] = {}
    paths = []
    for row in rows:
        whole = row.hash_ids[: row.input_length // block_size]
        paths.append(np.array([dense.setdefault(block, len(dense)) for block in whole], dtype=np.int32))
    arrivals = np.array([row.timestamp for row in rows]) / 1_000.0
    return Workload(
        paths,
        arrivals - arrivals[0],
        np.array([row.input_length for row in rows], dtype=np.int64),
        np.array([max(1, row.output_length) for row in rows], dtype=np.int64),
        block_size,
        [None if row.session_id is None else str(row.session_id) for row in rows],
    )
