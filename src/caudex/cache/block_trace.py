"""A request log reduced to what a prefix cache sees of it: which blocks the requests have in common."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from caudex import _core

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Requests in order of arrival, each a path in the tree of the log's distinct blocks.

    A block is there once, however many requests have it, and a request is the place where its path ends: memory is 16
    bytes for each request that brought new blocks, and 8 bytes a request and column. Built by `from_arrays`,
    `from_paths`, or in a stream by `TraceBuilder`. Raises ValueError where the columns do not fit together.
    """

    paths: _core.BlockPaths
    """Full blocks only."""
    input_lengths: NDArray[np.int64]
    """(requests,), prompt tokens."""
    block_size: int
    """Tokens a block."""
    timestamps: NDArray[np.float64] | None = None
    """(requests,), arrival in seconds, in any epoch."""
    output_lengths: NDArray[np.int64] | None = None
    """(requests,), generated tokens."""
    sessions: NDArray[np.int64] | None = None
    """(requests,), the conversation a request belongs to; negative where unknown."""
    tenants: NDArray[np.int64] | None = None
    """(requests,), whose request it is."""
    expected_returns: NDArray[np.float64] | None = None
    """(requests,), seconds until the session's next request as foretold with this one; negative where unknown."""
    session_ends: NDArray[np.bool_] | None = None
    """(requests,), whether the session was said to end with this request."""
    priorities: NDArray[np.float64] | None = None
    """(requests,), higher is kept longer by policies that look at it."""

    def __post_init__(self) -> None:
        for name, dtype in {"input_lengths": np.int64, **OPTIONAL_COLUMNS}.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_column(name, getattr(self, name), dtype))
        check_lengths(len(self), **self._columns())
        check_timestamps(self.timestamps)
        check_input(self.input_lengths, self.block_size)
        if len(self.paths) != len(self):
            raise ValueError(f"paths has {len(self.paths)} requests; input_lengths has {len(self)}")
        if np.any(self.num_full_blocks > self.input_lengths // self.block_size):
            raise ValueError("a path has more blocks than its input_length fills")

    @classmethod
    def from_arrays(
        cls, block_ids: ArrayLike, offsets: ArrayLike, input_lengths: ArrayLike, block_size: int, **columns: ArrayLike
    ) -> BlockTrace:
        """Build a trace from flat arrays: request `i` has the blocks `block_ids[offsets[i]:offsets[i + 1]]`.

        An id stands for its block and all before it; where one occurs behind two different paths, each place is a block
        of its own. Where `input_lengths[i]` is no multiple of `block_size`, the last id covers a partial block or may
        be left out; either way it is of no use to a cache and not kept. `columns` are the optional ones by name.
        """
        ids = as_column("block_ids", block_ids, np.int64)
        bounds = as_column("offsets", offsets, np.int64)
        lengths = as_column("input_lengths", input_lengths, np.int64)
        check_lengths(len(lengths), offsets=bounds[1:])
        check_offsets(bounds, len(ids), "block ids")
        check_input(lengths, block_size)
        builder = _core.BlockPathBuilder()
        full = np.minimum(np.diff(bounds), lengths // block_size)
        builder.add(ids, bounds, full, np.zeros(len(lengths), dtype=np.int64))
        return cls(builder.build(1), lengths, block_size, **columns)  # type: ignore[arg-type]

    @classmethod
    def from_paths(
        cls, paths: Sequence[Sequence[int]], input_lengths: ArrayLike, block_size: int, **columns: ArrayLike
    ) -> BlockTrace:
        """Build a trace from one list of block ids a request; `columns` are the optional ones by name."""
        lengths = [len(path) for path in paths]
        block_ids = np.fromiter((block for path in paths for block in path), dtype=np.int64, count=sum(lengths))
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return cls.from_arrays(block_ids, offsets, np.asarray(input_lengths), block_size, **columns)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.input_lengths)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in all prompts: what hit rates are fractions of."""
        return int(self.input_lengths.sum())

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks that a cache which holds everything would hold."""
        return self.paths.num_distinct

    @property
    def num_full_blocks(self) -> NDArray[np.int64]:
        """(requests,), blocks of each request that are filled to the last slot: what stays cached after it."""
        return self.paths.lengths()

    @property
    def num_reusable_blocks(self) -> NDArray[np.int64]:
        """(requests,), blocks that may be served: the last token is always computed, since its logits are needed."""
        most: NDArray[np.int64] = np.maximum(self.input_lengths - 1, 0) // self.block_size
        return np.minimum(self.num_full_blocks, most)

    def block_ids(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the flat form, at 8 bytes a reference: all paths in a row, and (requests + 1,) offsets into them.

        Blocks are numbered from 0 in order of first appearance; a number stands for its block and all before it.
        """
        return self.paths.block_ids(), np.concatenate([[0], np.cumsum(self.num_full_blocks)])

    def reuse_within(self, labels: ArrayLike) -> NDArray[np.int64]:
        """Return, for each request, its leading blocks that earlier requests of the same label have had.

        `labels` is (requests,) whole numbers: sessions, replicas, or all the same for the whole log.
        """
        column = as_column("labels", labels, np.int64)
        check_lengths(len(self), labels=column)
        return np.minimum(self.paths.reuse_within(column), self.num_reusable_blocks)

    def blocks_at(self, depths: ArrayLike) -> NDArray[np.int64]:
        """Return the number of each request's block at that depth, 0 being its first; -1 where its path is shorter."""
        column = as_column("depths", depths, np.int64)
        check_lengths(len(self), depths=column)
        return self.paths.blocks_at(column)

    def blocks_in_flight(self, done: NDArray[np.float64], served: NDArray[np.int64]) -> int:
        """Count the blocks that were asked for while they were first computed.

        Of the first `served[i]` blocks of each request, those whose first request had not come to its end, in seconds
        `done`, when request `i` arrived. The trace has timestamps.
        """
        if self.timestamps is None:
            raise ValueError("the trace has no timestamps")
        return self.paths.blocks_in_flight(self.timestamps, done, served)

    def shared_runs(self, least_weight: int) -> SharedRuns:
        """Return the runs of blocks that the same requests share, of at least that weight."""
        return SharedRuns(*self.paths.shared_runs(least_weight))

    def select(self, requests: NDArray[np.bool_] | slice) -> BlockTrace:
        """Return the trace of some of the requests, in the same order. Blocks keep their numbers."""
        chosen = np.arange(len(self))[requests]
        columns = {name: None if column is None else column[chosen] for name, column in self._columns().items()}
        return BlockTrace(self.paths.select(chosen), self.input_lengths[chosen], self.block_size, **columns)  # type: ignore[arg-type]

    def _columns(self) -> dict[str, NDArray[np.generic] | None]:
        return {name: getattr(self, name) for name in OPTIONAL_COLUMNS}


class SharedRuns(NamedTuple):
    """Runs of blocks that the same requests, two or more, share: a tree, parents before children."""

    parents: NDArray[np.int64]
    """(runs,), -1 for one that begins a path."""
    starts: NDArray[np.int64]
    """(runs,), depth of the first block."""
    ends: NDArray[np.int64]
    requests: NDArray[np.int64]
    """(runs,), how many share it."""
    weights: NDArray[np.int64]
    """(runs,), blocks that these requests have from `starts` on."""
    samples: NDArray[np.int64]
    """(runs,), the first of these requests."""


OPTIONAL_COLUMNS: dict[str, type[np.int64] | type[np.float64] | type[np.bool_]] = {
    "timestamps": np.float64,
    "output_lengths": np.int64,
    "sessions": np.int64,
    "tenants": np.int64,
    "expected_returns": np.float64,
    "session_ends": np.bool_,
    "priorities": np.float64,
}


def as_column(name: str, value: ArrayLike, dtype: type[T]) -> NDArray[T]:
    """Return a contiguous array of that type, or raise ValueError that names the column."""
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; it must be a flat array")
    if array.size and not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise ValueError(f"{name} holds {array.dtype}; it must hold {dtype.__name__}")
    return np.ascontiguousarray(array, dtype=dtype)


def check_lengths(num_requests: int, **columns: Sized | None) -> None:
    """Raise ValueError for a column that has not one entry a request (offsets are passed without their leading 0)."""
    for name, column in columns.items():
        if column is not None and len(column) != num_requests:
            extra = " and one more" if name == "offsets" else ""
            raise ValueError(f"{name} does not fit {num_requests} requests: it must have an entry for each{extra}")


def check_offsets(offsets: NDArray[np.int64], end: int, what: str) -> None:
    """Raise ValueError unless offsets rise from 0 to `end`."""
    if offsets[0] != 0 or offsets[-1] != end or np.any(np.diff(offsets) < 0):
        raise ValueError(f"offsets must rise from 0 to the number of {what}, {end}")


def check_input(input_lengths: NDArray[np.int64], block_size: int) -> None:
    """Raise ValueError for a negative length, or blocks of no token."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1 token")
    if np.any(input_lengths < 0):
        at = int(np.argmax(input_lengths < 0))
        raise ValueError(f"input_lengths[{at}] is {input_lengths[at]}; a prompt has no negative length")


def check_timestamps(timestamps: NDArray[np.float64] | None) -> None:
    """Raise ValueError for what is no point in time."""
    if timestamps is not None and not np.all(np.isfinite(timestamps)):
        at = int(np.argmin(np.isfinite(timestamps)))
        raise ValueError(f"timestamps[{at}] is {timestamps[at]}; it must be a number of seconds")
