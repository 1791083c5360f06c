"""Models and GPUs: the numbers that the roofline needs.

Models: fields of config.json on the model's Hugging Face page, parameters from its card. GPUs: memory, bandwidth and
dense 16-bit tensor throughput (without sparsity) from the vendor's data sheet; A10G from AWS's page on g5 instances.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with (grouped-query) attention, in 16 bits."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    active_parameters: float
    total_parameters: float

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * _BYTES_PER_ELEMENT

    @property
    def weight_bytes(self) -> float:
        return self.total_parameters * _BYTES_PER_ELEMENT

    @property
    def flops_per_token(self) -> float:
        """Of the matrix products with weights: a multiplication and an addition a parameter."""
        return 2.0 * self.active_parameters

    @property
    def attention_flops_per_pair(self) -> float:
        """For one query token and one key token: scores and weighted sum, over all heads and layers."""
        return 4.0 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: float
    bytes_per_second: float
    flops_per_second: float


MODELS = {
    shape.name.lower(): shape
    for shape in (
        ModelShape("SmolLM2-135M", 30, 9, 3, 64, 0.135e9, 0.135e9),
        ModelShape("Llama-3.2-1B", 16, 32, 8, 64, 1.24e9, 1.24e9),
        ModelShape("Llama-3.1-8B", 32, 32, 8, 128, 8.03e9, 8.03e9),
        ModelShape("Llama-3.1-70B", 80, 64, 8, 128, 70.6e9, 70.6e9),
        ModelShape("Qwen3-8B", 36, 32, 8, 128, 8.2e9, 8.2e9),
        ModelShape("Qwen3-32B", 64, 64, 8, 128, 32.8e9, 32.8e9),
        ModelShape("Mixtral-8x7B", 32, 32, 8, 128, 12.9e9, 46.7e9),
    )
}

GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        Gpu("H100", 80e9, 3.35e12, 989e12),
        Gpu("H200", 141e9, 4.8e12, 989e12),
        Gpu("B200", 180e9, 8.0e12, 2250e12),
        Gpu("A100-80GB", 80e9, 2.04e12, 312e12),
        Gpu("A100-40GB", 40e9, 1.555e12, 312e12),
        Gpu("L40S", 48e9, 0.864e12, 362e12),
        Gpu("L4", 24e9, 0.3e12, 121e12),
        Gpu("A10G", 24e9, 0.6e12, 70e12),
    )
}


def find_gpu(name: str) -> Gpu:
    """ValueError names the GPUs there are."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ValueError(f"unknown GPU {name!r}; known: {', '.join(g.name for g in GPUS.values())}") from None


def find_model(name: str) -> ModelShape:
    """A known model, or one from a directory with a config.json (or that file); ValueError otherwise."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    config = path / "config.json" if path.is_dir() else path
    if not config.is_file():
        known = ", ".join(model.name for model in MODELS.values())
        raise ValueError(f"unknown model {name!r}; give a directory with a config.json, or one of: {known}")
    return _shape_of(name, msgspec.json.decode(config.read_bytes()))


def _shape_of(name: str, config: dict[str, Any]) -> ModelShape:
    try:
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        inner, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
    except KeyError as error:
        raise ValueError(f"the config of {name} has no {error.args[0]}") from error
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = float(layers * (attention + 3 * hidden * inner) + embeddings)
    return ModelShape(name, layers, heads, kv_heads, head_dim, parameters, parameters)
