"""Decoders of the Llama family on the CPU: a step in one native call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from caudex.engine.adapter import Adapter
from caudex.engine.batch import Int32Array, StepBatch
from caudex.engine.cpu import KvPool, LlamaRunner, QuantizedBits
from caudex.engine.kv_memory import KvMemory
from caudex.engine.runner import ModelRunner


class FusedRunner(ModelRunner):
    """Runs a model from its packed weights; those that it was made from can be freed.

    A token's logits depend, to the bit, on its sequence's adapter and the tokens before it alone.
    """

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Tensor],
        adapters: Sequence[Adapter],
        pool: KvPool,
        max_model_len: int,
        *,
        bits: QuantizedBits | None = None,
    ) -> None:
        self._pool = pool
        self._llama = LlamaRunner(config, weights, pool, max_model_len, bits=bits)
        self._adapters = {adapter.name: self._llama.add_adapter(adapter) for adapter in adapters}
        self._num_heads = int(config.num_attention_heads)

    @property
    def kv_memory(self) -> KvMemory:
        return self._pool

    @property
    def is_bit_stable(self) -> bool:
        return True

    def copy_blocks(self, copies: Int32Array) -> None:
        self._pool.copy_blocks((source, target) for source, target, _ in copies.tolist())

    def run(self, batch: StepBatch) -> Tensor:
        metadata = self._pool.batch(
            batch.block_tables, np.diff(batch.query_starts), batch.context_lens, num_query_heads=self._num_heads
        )
        adapters = [-1 if name is None else self._adapters[name] for name in batch.adapters]
        return self._llama.forward(batch.token_ids, metadata, batch.logit_rows, np.array(adapters, dtype=np.int32))
