"""Which runner serves a model: the fastest that can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from caudex.engine.adapter import Adapter, read_adapter
from caudex.engine.config import EngineConfig, WeightsName
from caudex.engine.cpu import KvPool, QuantizedBits, ThreadPool, compile_norms, pack_linear_layers, why_unsupported
from caudex.engine.cpu_attention import CpuAttention
from caudex.engine.fused_runner import FusedRunner
from caudex.engine.loading import UnsupportedModelError
from caudex.engine.lora import LoraAdapters, adapter_matrices
from caudex.engine.model import LoadedModel
from caudex.engine.runner import ModelRunner, TransformersRunner
from caudex.engine.torch_attention import TorchAttention

WEIGHT_BITS: Final[Mapping[WeightsName, QuantizedBits | None]] = {"model": None, "int8": 8, "int4": 4}


def make_runner(loaded: LoadedModel, config: EngineConfig, num_blocks: int, max_model_len: int) -> ModelRunner:
    """The runner for `loaded`, by `config.attention_backend`, with a KV pool of `num_blocks`.

    On the CPU the compiled kernels serve it: the Llama family in one call a step, others through transformers' code
    with attention, linear layers and RMSNorms replaced.
    What they cannot do (other devices, soft caps, sinks) PyTorch does.

    Raises:
        UnsupportedModelError: the `cpu` backend is asked for, by name or by what it alone multiplies with, and cannot
            serve the model, or an adapter was made for another model; says why.
        FileNotFoundError: there is no adapter in a folder.
    """
    adapters = [read_adapter(name, folder) for name, folder in config.lora_adapters.items()]
    obstacle = why_not_cpu(loaded)
    if config.attention_backend == "cpu" and obstacle is not None:
        raise UnsupportedModelError(f"attention_backend is 'cpu', but {obstacle}; use 'torch' or 'auto'")
    if config.attention_backend == "torch" or obstacle is not None:
        _check_in_full_precision(loaded, config, obstacle or "attention_backend is 'torch'")
        return _torch_runner(loaded, adapters, config, num_blocks)
    return _cpu_runner(loaded, adapters, config, num_blocks, max_model_len)


def _check_in_full_precision(loaded: LoadedModel, config: EngineConfig, reason: str) -> None:
    for setting, value, otherwise in (
        ("weights", config.weights, "model"),
        ("kv_cache_dtype", config.kv_cache_dtype, "auto"),
    ):
        if value != otherwise:
            raise UnsupportedModelError(
                f"{setting} is {value!r}, which only the compiled CPU kernels multiply with, but {reason}; "
                f"serve {loaded.name} (model type {loaded.config.model_type!r}) with {setting} {otherwise!r}"
            )


def why_not_cpu(loaded: LoadedModel) -> str | None:
    """Why the compiled kernels cannot serve a model, or None if they can."""
    layers = loaded.layers
    if loaded.device.type != "cpu":
        return f"the model is on {loaded.device}"
    if loaded.dtype not in (torch.float32, torch.bfloat16):
        return f"the model computes in {loaded.dtype}"
    if len(set(layers)) > 1 or layers[0].key_size != layers[0].value_size:
        return "the model's layers have keys and values of different sizes"
    if any(options.softcap is not None or options.sinks is not None for options in loaded.options):
        return "the model's attention has soft-capped scores or sinks"
    return None


def _torch_runner(
    loaded: LoadedModel, adapters: Sequence[Adapter], config: EngineConfig, num_blocks: int
) -> ModelRunner:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    placed = LoraAdapters.load(loaded.module, adapters)
    backend = TorchAttention(loaded.layers, num_blocks, config.block_size, loaded.dtype, loaded.device)
    return TransformersRunner(loaded.module, backend, placed)


def _cpu_runner(
    loaded: LoadedModel, adapters: Sequence[Adapter], config: EngineConfig, num_blocks: int, max_model_len: int
) -> ModelRunner:
    """PyTorch is left one thread: two pools of idle threads that spin would take each other's cores."""
    torch.set_num_threads(1)
    bits = WEIGHT_BITS[config.weights]
    threads = ThreadPool(config.num_threads)
    shape = loaded.layers[0]
    pool = KvPool(
        len(loaded.layers),
        num_blocks,
        config.block_size,
        shape.num_kv_heads,
        shape.key_size,
        loaded.dtype,
        quantized=config.kv_cache_dtype == "int8",
        threads=threads,
    )
    if why_unsupported(loaded.config, max_model_len) is None:
        return FusedRunner(loaded.config, loaded.weights, adapters, pool, max_model_len, bits=bits)
    placed = LoraAdapters.load(loaded.module, adapters)
    exact = {loaded.module.get_output_embeddings(), *adapter_matrices(loaded.module)}
    pack_linear_layers(loaded.module, threads, bits=bits, exact=exact)
    compile_norms(loaded.module, threads)
    return TransformersRunner(loaded.module, CpuAttention(pool, shape.num_heads), placed)
