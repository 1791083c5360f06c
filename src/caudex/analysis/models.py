"""Well-known models and GPUs: the few numbers that cache arithmetic needs, each from its maker's own page.

Models: fields as in the model's config.json on its Hugging Face page; `active_parameters` from the model card (for
mixtures of experts, those active for one token); `weights_bytes` only where weights are not published in 16 bits.
GPUs: memory, bandwidth and dense 16-bit tensor throughput from the vendor's data sheet (without sparsity).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def _dense(
    layers: int, heads: int, kv_heads: int, head_dim: int, billions: float, total: float | None = None
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "active_parameters": billions * 1e9,
        "total_parameters": (total or billions) * 1e9,
    }


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": _dense(30, 9, 3, 64, 0.135),
    "SmolLM2-1.7B-Instruct": _dense(24, 32, 32, 64, 1.71),
    "Llama-2-7B": _dense(32, 32, 32, 128, 6.74),
    "Llama-2-13B": _dense(40, 40, 40, 128, 13.0),
    "Llama-2-70B": _dense(80, 64, 8, 128, 69.0),
    "Llama-3.2-1B": _dense(16, 32, 8, 64, 1.24),
    "Llama-3.2-3B": _dense(28, 24, 8, 128, 3.21),
    "Llama-3.1-8B": _dense(32, 32, 8, 128, 8.03),
    "Llama-3.1-70B": _dense(80, 64, 8, 128, 70.6),
    "Llama-3.3-70B": _dense(80, 64, 8, 128, 70.6),
    "Llama-3.1-405B": _dense(126, 128, 8, 128, 405.0),
    "Mistral-7B-v0.3": _dense(32, 32, 8, 128, 7.25),
    "Mistral-Small-24B": _dense(40, 32, 8, 128, 23.6),
    "Mixtral-8x7B": _dense(32, 32, 8, 128, 12.9, 46.7),
    "Qwen2.5-7B": _dense(28, 28, 4, 128, 7.62),
    "Qwen2.5-32B": _dense(64, 40, 8, 128, 32.8),
    "Qwen2.5-72B": _dense(80, 64, 8, 128, 72.7),
    "Qwen3-8B": _dense(36, 32, 8, 128, 8.19),
    "Qwen3-32B": _dense(64, 64, 8, 128, 32.8),
    "Qwen3-30B-A3B": _dense(48, 32, 4, 128, 3.3, 30.5),
    "Qwen3-235B-A22B": _dense(94, 64, 4, 128, 22.0, 235.0),
    "Gemma-2-9B": {**_dense(42, 16, 8, 256, 9.24), "sliding_window": 4096, "sliding_window_pattern": 2},
    "Gemma-3-27B": {**_dense(62, 32, 16, 128, 27.4), "sliding_window": 1024, "sliding_window_pattern": 6},
    "gpt-oss-20b": {**_dense(24, 64, 8, 64, 3.6, 20.9), "sliding_window": 128, "sliding_window_pattern": 2},
    "gpt-oss-120b": {**_dense(36, 64, 8, 64, 5.1, 116.8), "sliding_window": 128, "sliding_window_pattern": 2},
    "DeepSeek-V2-Lite": {**_dense(27, 16, 16, 128, 2.4, 15.7), "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "DeepSeek-V3": {**_dense(61, 128, 128, 128, 37.0, 671.0), "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "DeepSeek-R1": {**_dense(61, 128, 128, 128, 37.0, 671.0), "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "Kimi-K2": {**_dense(61, 64, 64, 128, 32.0, 1000.0), "kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator: memory in bytes, bandwidth in bytes a second, dense 16-bit operations a second."""

    name: str
    memory: float
    bandwidth: float
    flops: float


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A10G", 24 * 2**30, 600e9, 70e12),
        Gpu("L4", 24 * 2**30, 300e9, 121e12),
        Gpu("L40S", 48 * 2**30, 864e9, 362e12),
        Gpu("RTX-4090", 24 * 2**30, 1008e9, 165e12),
        Gpu("A100-40GB", 40 * 2**30, 1555e9, 312e12),
        Gpu("A100-80GB", 80 * 2**30, 2039e9, 312e12),
        Gpu("H100", 80 * 2**30, 3350e9, 989e12),
        Gpu("H200", 141e9, 4800e9, 989e12),
        Gpu("B200", 180e9, 8000e9, 2250e12),
        Gpu("MI300X", 192e9, 5300e9, 1307e12),
    )
}


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, however it is spelt. Raises ValueError that lists the known ones."""
    wanted = "".join(c for c in name.lower() if c.isalnum())
    for known, gpu in GPUS.items():
        if "".join(c for c in known.lower() if c.isalnum()) == wanted:
            return gpu
    starting = [gpu for known, gpu in GPUS.items() if known.lower().startswith(name.lower())]
    if len(starting) == 1:
        return starting[0]
    raise ValueError(f"gpu is {name!r}; known are {', '.join(GPUS)}")
