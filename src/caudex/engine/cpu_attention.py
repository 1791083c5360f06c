"""The compiled attention backend under transformers' model code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from caudex.engine.attention import AttentionBackend, AttentionOptions, LayerAttention, LayerShape
from caudex.engine.batch import Int32Array, StepBatch
from caudex.engine.cpu import BatchMetadata, KvPool, ThreadPool


def cpu_attention_obstacle(
    layers: Sequence[LayerShape], options: Sequence[AttentionOptions], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the compiled backend cannot serve a model, or None if it can."""
    if device.type != "cpu":
        return f"the model is on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the model computes in {dtype}"
    if len(set(layers)) > 1 or layers[0].key_size != layers[0].value_size:
        return "the model's layers have keys and values of different sizes"
    if any(option.softcap is not None or option.sinks is not None for option in options):
        return "the model's attention has soft-capped scores or sinks"
    return None


class CpuAttention(AttentionBackend):
    """Keys and values in a compiled KvPool, read in place through the block tables.

    A row's output has the same bits whatever shares its batch, however its prompt was chunked, wherever its KV lies.
    """

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, threads: ThreadPool
    ) -> None:
        shape = layers[0]
        self._num_heads = shape.num_heads
        self._pool = KvPool(
            len(layers), num_blocks, block_size, shape.num_kv_heads, shape.key_size, dtype, threads=threads
        )

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
