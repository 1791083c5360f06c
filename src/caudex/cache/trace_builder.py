"""Block traces built in a stream, from batches of tokens or of block ids."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from caudex import _core
from caudex.cache.block_trace import BlockTrace, check_lengths


class TraceBuilder:
    """Takes a log batch by batch and keeps its distinct content: memory does not grow with what is repeated.

    Of `kind` "tokens", requests are token ids, and traces of any block size can be made of them: 36 bytes for 16
    distinct tokens, which tell exactly what is shared in a vocabulary of up to 65,536 tokens; in a larger one a request
    may be credited the token behind what it shares, with probability 2^-16. Of `kind` "blocks", they are ids of
    blocks of `unit` tokens, and block sizes are multiples of that: 8 bytes a distinct block. Besides, at most 64 bytes
    for each request with something new in it and 16 for any request.
    """

    def __init__(self, kind: Literal["tokens", "blocks"], unit: int = 1) -> None:
        if unit < 1 or (kind == "tokens" and unit != 1):
            raise ValueError(f"unit is {unit}; expected 1 for tokens, and at least 1 for blocks")
        self.unit = unit
        self._builder: Any = _core.TokenPathBuilder() if kind == "tokens" else _core.BlockPathBuilder()
        self._dtype = np.int32 if kind == "tokens" else np.int64
        self._input_lengths: list[NDArray[np.int64]] = []
        self._roots: dict[Hashable, int] = {}

    @property
    def num_distinct_tokens(self) -> int:
        """Tokens of a cache that holds everything."""
        return int(self._builder.num_distinct) * self.unit

    @property
    def num_bytes(self) -> int:
        """What the core holds."""
        return int(self._builder.bytes)

    def add(
        self,
        values: NDArray[np.integer[Any]],
        offsets: NDArray[np.int64],
        input_lengths: ArrayLike,
        namespaces: Sequence[Hashable] | None = None,
    ) -> NDArray[np.int64]:
        """Take requests: request `i` is `values[offsets[i]:offsets[i + 1]]`, of `input_lengths[i]` tokens.

        Requests of different `namespaces` share nothing. Returns, for each, how many of its leading tokens earlier
        requests have had, in whole units. The GIL is free meanwhile.
        """
        lengths = np.asarray(input_lengths, dtype=np.int64)
        bounds = np.ascontiguousarray(offsets, dtype=np.int64)
        names = [None] * len(lengths) if namespaces is None else namespaces
        check_lengths(len(lengths), offsets=bounds[1:], namespaces=names)
        roots = np.fromiter((self._roots.setdefault(name, len(self._roots)) for name in names), np.int64, len(names))
        units = np.minimum(np.diff(bounds), lengths // self.unit)
        known = self._builder.add(np.ascontiguousarray(values, dtype=self._dtype), bounds, units, roots)
        self._input_lengths.append(lengths)
        return known * self.unit  # type: ignore[no-any-return]

    def build(self, block_size: int, **columns: ArrayLike | None) -> BlockTrace:
        """Return the trace of all requests so far, in blocks of that many tokens; `columns` are BlockTrace's."""
        if block_size < 1 or block_size % self.unit:
            raise ValueError(f"block_size is {block_size}; expected a multiple of {self.unit}, what the log has")
        lengths = np.concatenate([np.zeros(0, dtype=np.int64), *self._input_lengths])
        return BlockTrace(self._builder.build(block_size // self.unit), lengths, block_size, **columns)  # type: ignore[arg-type]
