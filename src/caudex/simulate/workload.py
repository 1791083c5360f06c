"""What arrives: requests as paths of block ids, with times and lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caudex.trace.chain import every_block, prefix_hashes, seed_of

MAX_ID = 2**31 - 2

DEFAULT_OUTPUT_TOKENS = 128
"""For requests whose log does not say how much was generated."""


@dataclass(frozen=True, slots=True)
class _Row:
    arrival: float
    path: NDArray[np.int32]
    input_length: int
    output_length: int
    session: str | None


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    Request i's path is `ids[offsets[i] : offsets[i + 1]]`: the ids of its whole blocks, chained, so that equal ids mean
    equal blocks with equal blocks before them. They are dense int32, which the cache takes for tokens, one a block;
    `keys(i)` are the same for routing. One array for all paths, since a million small ones would take twice the memory.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    arrivals: NDArray[np.float64]
    input_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    block_size: int
    sessions: list[str | None]

    def __len__(self) -> int:
        return len(self.arrivals)

    def path(self, i: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    def keys(self, i: int) -> NDArray[np.uint64]:
        return self.path(i).astype(np.uint64)

    def own_id(self, i: int) -> int:
        """The id of what request i alone has: the rest of its prompt, less than a block, and what is generated."""
        return MAX_ID - i

    def faster(self, factor: float) -> Workload:
        """The same requests, arriving `factor` times as fast."""
        if not 0 < factor < math.inf:
            raise ValueError(f"the speed-up is {factor}; it must be a number above 0")
        return replace(self, arrivals=self.arrivals / factor)

    def open_loop(self, rate: float, seed: int) -> Workload:
        """The same requests in the same order, arriving as a Poisson process of `rate` a second."""
        if not 0 < rate < math.inf:
            raise ValueError(f"the rate is {rate} requests a second; it must be a number above 0")
        gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(self))
        return replace(self, arrivals=np.cumsum(gaps))

    @cached_property
    def infinite_cache_hits(self) -> NDArray[np.int64]:
        """Tokens of each request that one cache without end would serve, requests one after another.

        A block was seen before exactly if all before it were, so the hits of a path are its ids whose first owner is
        another request; at least one token is always computed.
        """
        lengths = np.diff(self.offsets)
        owners = np.repeat(np.arange(len(self), dtype=np.int32), lengths)
        first_owner = np.zeros(int(self.ids.max(initial=-1)) + 1, dtype=np.int32)
        first_owner[self.ids[::-1]] = owners[::-1]  # of equal indices the last assignment stays
        seen = np.bincount(owners[first_owner[self.ids] != owners], minlength=len(self))
        return np.minimum(seen, (self.input_lengths - 1) // self.block_size) * self.block_size


def read_workload(
    path: Path,
    *,
    tokenizer: str | None = None,
    block_size: int = 16,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """Reads any log or trace that `caudex.trace` reads; prompts that are text or tokens are cut into blocks of
    `block_size`. Requests without a time arrive one a second, those without an output length make
    DEFAULT_OUTPUT_TOKENS tokens. TraceError where the log cannot be read, ValueError where it is empty."""
    from caudex.trace.log import open_log

    log = open_log(path, tokenizer=tokenizer, limit=limit, progress=progress)
    size = log.info.block_size or block_size
    rows: list[_Row] = []
    dense: dict[int, int] = {}
    for batch in log.batches:
        rows.extend(_rows(batch.to_pydict(), log.info.kind, size, dense, len(rows)))
    if not rows:
        raise ValueError(f"{path} has no requests")
    return _workload(rows, size)


def _rows(columns: dict[str, Any], kind: str, size: int, dense: dict[int, int], first: int) -> Iterator[_Row]:
    prompts = columns["block_ids" if kind == "blocks" else "token_ids"]
    for i, prompt in enumerate(prompts):
        length = max(1, columns["input_length"][i])
        hashes = np.asarray(prompt, dtype=np.int64)
        if kind == "tokens":
            namespace = (columns[name][i] or "" for name in ("model", "lora", "salt"))
            hashes = every_block(prefix_hashes(hashes, seed_of(*namespace)), size)
        path = [dense.setdefault(block, len(dense)) for block in hashes[: length // size].tolist()]
        time = columns["timestamp"][i]
        yield _Row(
            float(first + i) if time is None else time,
            np.array(path, dtype=np.int32),
            length,
            columns["output_length"][i] or DEFAULT_OUTPUT_TOKENS,
            columns["session"][i],
        )


def _workload(rows: list[_Row], block_size: int) -> Workload:
    rows = sorted(rows, key=lambda row: row.arrival)
    arrivals = np.array([row.arrival for row in rows])
    return Workload(
        np.concatenate([row.path for row in rows]),
        np.cumsum([0, *(len(row.path) for row in rows)]),
        arrivals - arrivals[0],
        np.array([row.input_length for row in rows], dtype=np.int64),
        np.array([row.output_length for row in rows], dtype=np.int64),
        block_size,
        [row.session for row in rows],
    )
