"""How much memory the keys and values of one token take, from a model's config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caudex.sizing.models import KNOWN_MODELS, find_known, load_config

BYTES_OF_DTYPE = {
    "fp32": 4.0, "float32": 4.0, "bf16": 2.0, "bfloat16": 2.0, "fp16": 2.0, "float16": 2.0,
    "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int8": 1.0, "int4": 0.5, "fp4": 0.5,
    "q8_0": 34 / 32, "q4_0": 18 / 32,
}  # fmt: skip
"""Bytes an element; GGUF's block formats with their scales (32 elements in 34 or 18 bytes)."""

_SLIDING = frozenset({"sliding_attention", "chunked_attention", "local_attention", "local"})
_NO_KV = frozenset({"linear_attention", "mamba", "recurrent", "conv", "ssm"})
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}
"""Every how many layers one is global, of models whose config.json leaves it to the code."""


@dataclass(frozen=True, slots=True)
class KvSize:
    """KV memory of one model at one dtype.

    `bytes_per_token` is what a token takes in layers that keep every token; `sliding_bytes_per_token` what it takes
    besides while it is inside the window of `sliding_window` tokens. A prefix of n tokens thus takes
    `bytes_of_prefix(n)`.
    """

    model: str
    attention: str
    dtype: str
    full_layers: int
    sliding_layers: int
    state_layers: int
    elements_per_layer: int
    bytes_per_token: float
    sliding_bytes_per_token: float = 0.0
    sliding_window: int | None = None
    parameters: float | None = None

    def bytes_of_prefix(self, num_tokens: int) -> float:
        inside = num_tokens if self.sliding_window is None else min(num_tokens, self.sliding_window)
        return num_tokens * self.bytes_per_token + inside * self.sliding_bytes_per_token

    @property
    def bytes_per_cached_token(self) -> float:
        """What to reckon with for a token of a pool: full layers and, as engines allocate them, sliding ones too."""
        return self.bytes_per_token + self.sliding_bytes_per_token


def kv_size(model: str | Path | dict[str, Any], dtype: str = "bf16", *, tensor_parallel: int = 1) -> KvSize:
    """KV bytes a token of a model given by name, config.json, folder or parsed config.

    Grouped-query attention counts KV heads, not query heads. Multi-latent attention (DeepSeek) counts the compressed
    vector and the rotary part, once and not twice. Layers with a sliding window count apart, since they keep the
    window only. Linear-attention and state-space layers keep no KV. With `tensor_parallel`, bytes are those of one
    device: KV heads are divided, but never below one, and latent vectors are kept whole on each.

    Raises:
        ValueError: the model or dtype is not known, or the config lacks what is needed; the message names it.
    """
    name, config = load_config(model)
    if dtype not in BYTES_OF_DTYPE:
        raise ValueError(f"dtype is {dtype!r}; known are {', '.join(BYTES_OF_DTYPE)}")
    config = config.get("text_config") or config.get("llm_config") or config
    layers = _integer(config, name, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    kinds = _layer_kinds(config, layers)
    elements, attention = _elements_per_layer(config, name, tensor_parallel)
    full = sum(kind not in _SLIDING and kind not in _NO_KV for kind in kinds)
    sliding = sum(kind in _SLIDING for kind in kinds)
    window = config.get("sliding_window") or config.get("attention_chunk_size")
    width = BYTES_OF_DTYPE[dtype]
    return KvSize(
        model=name,
        attention=attention,
        dtype=dtype,
        full_layers=full,
        sliding_layers=sliding,
        state_layers=layers - full - sliding,
        elements_per_layer=elements,
        bytes_per_token=full * elements * width,
        sliding_bytes_per_token=sliding * elements * width,
        sliding_window=int(window) if sliding and window else None,
        parameters=_parameters(model, config),
    )


def _integer(config: dict[str, Any], name: str, *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError(f"the config of {name} has no {keys[0]}")


def _layer_kinds(config: dict[str, Any], layers: int) -> list[str]:
    """One kind a layer. Configs say it as a list, as a pattern ("every 6th is global"), or as one window for all."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [str(kind) for kind in kinds]
    interval = config.get("full_attention_interval")
    if isinstance(interval, int) and interval > 1:
        return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    rotary = config.get("no_rope_layers")
    if config.get("attention_chunk_size") and isinstance(rotary, list) and len(rotary) == layers:
        return ["chunked_attention" if rope else "full_attention" for rope in rotary]
    pattern = config.get("sliding_window_pattern") or _PATTERNS.get(str(config.get("model_type")))
    if isinstance(pattern, int) and pattern > 1 and config.get("sliding_window"):
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    attention_layers = config.get("attn_layer_period")
    if isinstance(attention_layers, int) and attention_layers > 1:
        offset = int(config.get("attn_layer_offset", 0))
        return ["full_attention" if i % attention_layers == offset else "mamba" for i in range(layers)]
    windowed = (
        config.get("sliding_window") and config.get("use_sliding_window", True) and config.get("model_type") != "qwen2"
    )
    return ["sliding_attention" if windowed else "full_attention"] * layers


def _elements_per_layer(config: dict[str, Any], name: str, tensor_parallel: int) -> tuple[int, str]:
    if config.get("kv_lora_rank"):
        rope = int(config.get("qk_rope_head_dim") or 0)
        index = int(config.get("index_head_dim") or 0)
        return int(config["kv_lora_rank"]) + rope + index, "multi-latent"
    heads = _integer(config, name, "num_attention_heads", "n_head", "n_heads")
    kv_heads = config.get("num_key_value_heads") or config.get("n_head_kv") or config.get("num_kv_heads") or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    hidden = config.get("hidden_size") or config.get("n_embd") or config.get("d_model")
    head_dim = config.get("head_dim") or (int(hidden) // heads if hidden else None)
    if head_dim is None:
        raise ValueError(f"the config of {name} has neither head_dim nor hidden_size")
    value_dim = config.get("v_head_dim") or head_dim
    attention = "multi-head" if kv_heads == heads else "multi-query" if kv_heads == 1 else "grouped-query"
    return math.ceil(int(kv_heads) / tensor_parallel) * (int(head_dim) + int(value_dim)), attention


def _parameters(model: str | Path | dict[str, Any], config: dict[str, Any]) -> float | None:
    """Parameters active for a token: from the table, else reckoned for a dense gated transformer."""
    known = find_known(str(model)) if not isinstance(model, dict) else None
    if known is not None:
        return float(KNOWN_MODELS[known]["active_parameters"])
    hidden, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    inner, vocabulary = config.get("intermediate_size"), config.get("vocab_size", 0)
    heads = config.get("num_attention_heads")
    if not (hidden and layers and inner and heads) or config.get("num_experts") or config.get("n_routed_experts"):
        return None
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return float(layers * (attention + 3 * hidden * inner) + 2 * vocabulary * hidden)
