"""Model runners: a step's batch in, logits out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from caudex.engine.attention import AttentionBackend, attending
from caudex.engine.batch import Int32Array, StepBatch
from caudex.engine.config import EngineConfig
from caudex.engine.cpu import ThreadPool
from caudex.engine.cpu_attention import CpuAttention, cpu_attention_obstacle
from caudex.engine.loading import UnsupportedModelError
from caudex.engine.model import LoadedModel
from caudex.engine.torch_attention import TorchAttention


class ModelRunner(ABC):
    """Owns the weights and the KV pool. Only the engine's thread calls it."""

    @abstractmethod
    def copy_blocks(self, copies: Int32Array) -> None:
        """Copy KV inside the pool, row by row in order: shape (n, 3), (source block, target block, slots to copy)."""

    @abstractmethod
    def run(self, batch: StepBatch) -> Tensor:
        """Write the KV of the batch's tokens and return float32 logits of its `logit_rows`, shape (R, vocabulary)."""


class TransformersRunner(ModelRunner):
    """Runs transformers' own model code, with attention replaced by `backend`. Serves any supported architecture."""

    def __init__(self, model: Any, backend: AttentionBackend) -> None:
        self._model = model
        self._backend = backend
        self._device = model.device

    def copy_blocks(self, copies: Int32Array) -> None:
        self._backend.copy_blocks(copies)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        rows = torch.from_numpy(batch.logit_rows).to(self._device, torch.long)
        with attending(self._backend.begin_step(batch)):
            output = self._model(
                input_ids=torch.from_numpy(batch.token_ids).to(self._device, torch.long)[None],
                position_ids=torch.from_numpy(batch.positions).to(self._device, torch.long)[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: Tensor = output.logits[0]
        return logits.float()


def make_runner(loaded: LoadedModel, config: EngineConfig, num_blocks: int) -> ModelRunner:
    """The runner for a loaded model, by `config.attention_backend`, with a KV pool of `num_blocks`.

    Raises:
        UnsupportedModelError: the `cpu` backend is asked for by name and cannot serve the model; says why.
    """
    obstacle = cpu_attention_obstacle(loaded.layers, loaded.options, loaded.dtype, loaded.device)
    if config.attention_backend == "cpu" and obstacle is not None:
        raise UnsupportedModelError(f"attention_backend is 'cpu', but {obstacle}; use 'torch' or 'auto'")
    if config.attention_backend == "torch" or obstacle is not None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        backend = TorchAttention(loaded.layers, num_blocks, config.block_size, loaded.dtype, loaded.device)
        return TransformersRunner(loaded.model, backend)
    threads = ThreadPool(config.num_threads)
    return TransformersRunner(
        loaded.model, CpuAttention(loaded.layers, num_blocks, config.block_size, loaded.dtype, threads)
    )
