"""What one engine step computes, in the form the kernels take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudex import _core


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """The sequences of one step and how their attention is shared out; made by `KvPool.batch`, used by every layer.

    Row r of the step's packed tensors is a new token; sequence i owns `query_lens[i]` consecutive rows.
    """

    native: _core.Batch
    plan: _core.AttentionPlan
    num_query_heads: int
    positions: NDArray[np.int32]
    """[rows] the position of each row's token in its sequence."""

    @property
    def num_rows(self) -> int:
        return self.native.num_rows

    @property
    def num_sequences(self) -> int:
        return self.native.num_sequences


def make_batch(
    block_tables: Sequence[NDArray[np.int32]],
    query_lens: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    *,
    pool: _core.KvPool,
    block_size: int,
    num_kv_heads: int,
    num_query_heads: int,
    num_threads: int,
) -> BatchMetadata:
    """See `KvPool.batch`, which knows all but the first three."""
    if num_query_heads % num_kv_heads:
        raise ValueError(f"{num_query_heads} query heads cannot be shared evenly by {num_kv_heads} KV heads")
    native = _core.Batch(
        block_tables,
        np.ascontiguousarray(query_lens, dtype=np.int32),
        np.ascontiguousarray(context_lens, dtype=np.int32),
        block_size,
        pool.num_blocks,
    )
    plan = _core.AttentionPlan(native, num_kv_heads, num_query_heads // num_kv_heads, num_threads)
    return BatchMetadata(native, plan, num_query_heads, native.positions())
