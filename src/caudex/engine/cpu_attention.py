"""The compiled attention backend under transformers' model code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from caudex.engine.attention import AttentionBackend, AttentionOptions, LayerAttention
from caudex.engine.batch import Int32Array, StepBatch
from caudex.engine.cpu import BatchMetadata, KvPool
from caudex.engine.kv_memory import KvMemory


class CpuAttention(AttentionBackend):
    """Keys and values in a compiled KvPool, read in place through the block tables.

    A row's output has the same bits whatever shares its batch, however its prompt was chunked, wherever its KV lies.
    """

    is_bit_stable = True

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        self._pool = pool
        self._num_heads = num_heads

    @property
    def kv_memory(self) -> KvMemory:
        return self._pool

    def copy_blocks(self, copies: Int32Array) -> None:
        self._pool.copy_blocks((source, target) for source, target, _ in copies.tolist())

    def begin_step(self, batch: StepBatch) -> LayerAttention:
        query_lens = np.diff(batch.query_starts)
        metadata = self._pool.batch(batch.block_tables, query_lens, batch.context_lens, num_query_heads=self._num_heads)
        return _CpuStep(self._pool, metadata)


@dataclass(frozen=True, slots=True)
class _CpuStep:
    pool: KvPool
    batch: BatchMetadata

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.pool.write(layer, key.transpose(0, 1), value.transpose(0, 1), self.batch)
        return self.pool.attend(layer, query.transpose(0, 1), self.batch, options.scale)
