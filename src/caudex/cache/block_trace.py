"""A request log reduced to what a prefix cache sees of it: flat arrays of prefix-chained block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Requests in order of arrival, each a path of block ids; an id stands for its block and all before it.

    Request `i` holds the blocks `block_ids[offsets[i]:offsets[i + 1]]`. Where `input_lengths[i]` is no multiple of
    `block_size`, the last id covers a partial block or may be left out. Arrays are converted to contiguous ones of
    the stated types, without a copy where they already are. Raises ValueError where they do not fit together.
    """

    block_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """(requests + 1,), from 0 to the number of block ids."""
    input_lengths: NDArray[np.int64]
    """(requests,), prompt tokens."""
    block_size: int
    """Tokens a block."""
    timestamps: NDArray[np.float64] | None = None
    """(requests,), arrival in seconds, in any epoch."""
    output_lengths: NDArray[np.int64] | None = None
    """(requests,), generated tokens."""
    sessions: NDArray[np.int64] | None = None
    """(requests,), the conversation a request belongs to."""
    tenants: NDArray[np.int64] | None = None
    """(requests,), whose request it is."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_column(name, getattr(self, name), dtype))
        columns = {name: getattr(self, name) for name in ("timestamps", "output_lengths", "sessions", "tenants")}
        check_lengths(len(self), offsets=self.offsets[1:], **columns)
        check_offsets(self.offsets, len(self.block_ids), "block ids")
        check_timestamps(self.timestamps)
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; it must be at least 1 token")
        if np.any(self.input_lengths < 0):
            at = int(np.argmax(self.input_lengths < 0))
            raise ValueError(f"input_lengths[{at}] is {self.input_lengths[at]}; a prompt has no negative length")

    @classmethod
    def from_paths(
        cls, paths: Sequence[Sequence[int]], input_lengths: ArrayLike, block_size: int, **columns: ArrayLike
    ) -> BlockTrace:
        """Build a trace from one list of block ids a request; `columns` are the optional arrays by name."""
        lengths = [len(path) for path in paths]
        block_ids = np.fromiter((block for path in paths for block in path), dtype=np.int64, count=sum(lengths))
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return cls(block_ids, offsets, np.asarray(input_lengths), block_size, **columns)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.input_lengths)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in all prompts: what hit rates are fractions of."""
        return int(self.input_lengths.sum())

    @property
    def num_full_blocks(self) -> NDArray[np.int64]:
        """(requests,), blocks of each request that are filled to the last slot: what stays cached after it."""
        return np.minimum(np.diff(self.offsets), self.input_lengths // self.block_size)

    def select(self, requests: NDArray[np.bool_] | slice) -> BlockTrace:
        """Return the trace of some of the requests, in the same order."""
        chosen = np.arange(len(self))[requests]
        lengths = np.diff(self.offsets)[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        source = np.repeat(self.offsets[:-1][chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        columns = {
            name: None if (value := getattr(self, name)) is None else value[chosen]
            for name in ("timestamps", "output_lengths", "sessions", "tenants")
        }
        return BlockTrace(self.block_ids[source], offsets, self.input_lengths[chosen], self.block_size, **columns)


_DTYPES: dict[str, type[np.int64] | type[np.float64]] = {
    "block_ids": np.int64,
    "offsets": np.int64,
    "input_lengths": np.int64,
    "timestamps": np.float64,
    "output_lengths": np.int64,
    "sessions": np.int64,
    "tenants": np.int64,
}


def as_column(name: str, value: ArrayLike, dtype: type[T]) -> NDArray[T]:
    """Return a contiguous array of that type, or raise ValueError that names the column."""
    array = np.asarray(value)
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; it must be a flat array")
    if array.size and not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise ValueError(f"{name} holds {array.dtype}; it must hold {dtype.__name__}")
    return np.ascontiguousarray(array, dtype=dtype)


def check_lengths(num_requests: int, **columns: NDArray[np.generic] | None) -> None:
    """Raise ValueError for a column that has not one entry a request (offsets are passed without their leading 0)."""
    for name, column in columns.items():
        if column is not None and len(column) != num_requests:
            extra = " and one more" if name == "offsets" else ""
            raise ValueError(f"{name} does not fit {num_requests} requests: it must have an entry for each{extra}")


def check_offsets(offsets: NDArray[np.int64], end: int, what: str) -> None:
    """Raise ValueError unless offsets rise from 0 to `end`."""
    if offsets[0] != 0 or offsets[-1] != end or np.any(np.diff(offsets) < 0):
        raise ValueError(f"offsets must rise from 0 to the number of {what}, {end}")


def check_timestamps(timestamps: NDArray[np.float64] | None) -> None:
    """Raise ValueError for what is no point in time."""
    if timestamps is not None and not np.all(np.isfinite(timestamps)):
        at = int(np.argmin(np.isfinite(timestamps)))
        raise ValueError(f"timestamps[{at}] is {timestamps[at]}; it must be a number of seconds")
