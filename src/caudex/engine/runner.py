"""Model runners: a step's batch in, logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from caudex.engine.attention import AttentionBackend, attending
from caudex.engine.batch import Int32Array, StepBatch
from caudex.engine.kv_memory import KvMemory
from caudex.engine.lora import LoraAdapters


class ModelRunner(ABC):
    """Owns the weights and the KV pool. Only the engine's thread calls it.

    `is_bit_stable` says whether a row's logits are the same bits whatever else is in the step: with that, tokens can be
    computed on a guess without changing what comes out.
    """

    @property
    def is_bit_stable(self) -> bool:
        return False

    @property
    @abstractmethod
    def kv_memory(self) -> KvMemory:
        """The pool's blocks as bytes."""

    @abstractmethod
    def copy_blocks(self, copies: Int32Array) -> None:
        """Copy KV inside the pool, row by row in order: shape (n, 3), (source block, target block, slots to copy)."""

    @abstractmethod
    def run(self, batch: StepBatch) -> Tensor:
        """Write the KV of the batch's tokens and return float32 logits of its `logit_rows`, shape (R, vocabulary)."""


class TransformersRunner(ModelRunner):
    """Runs transformers' own model code, with attention replaced by `backend`. Serves any supported architecture."""

    def __init__(self, model: Any, backend: AttentionBackend, adapters: LoraAdapters) -> None:
        self._model = model
        self._adapters = adapters
        self._backend = backend
        self._device = model.device

    @property
    def kv_memory(self) -> KvMemory:
        return self._backend.kv_memory

    @property
    def is_bit_stable(self) -> bool:
        return self._backend.is_bit_stable

    def copy_blocks(self, copies: Int32Array) -> None:
        self._backend.copy_blocks(copies)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        rows = torch.from_numpy(batch.logit_rows).to(self._device, torch.long)
        with attending(self._backend.begin_step(batch)), self._adapters.adapting(batch):
            output = self._model(
                input_ids=torch.from_numpy(batch.token_ids).to(self._device, torch.long)[None],
                position_ids=torch.from_numpy(batch.positions).to(self._device, torch.long)[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: Tensor = output.logits[0]
        return logits.float()
