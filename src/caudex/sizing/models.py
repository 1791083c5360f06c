"""Well-known models: the few numbers that cache arithmetic needs, each from its maker's own page (`source`).

Fields as in the config.json there; `active_parameters` from the model card (for mixtures of experts, those active for
one token).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

HUB = "https://huggingface.co/"


def _dense(
    repository: str, layers: int, heads: int, kv_heads: int, head_dim: int, billions: float, total: float | None = None
) -> dict[str, Any]:
    return {
        "source": f"{HUB}{repository}",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "active_parameters": billions * 1e9,
        "total_parameters": (total or billions) * 1e9,
    }


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": _dense("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 9, 3, 64, 0.135),
    "SmolLM2-1.7B-Instruct": _dense("HuggingFaceTB/SmolLM2-1.7B-Instruct", 24, 32, 32, 64, 1.71),
    "Llama-2-7B": _dense("meta-llama/Llama-2-7b-hf", 32, 32, 32, 128, 6.74),
    "Llama-2-13B": _dense("meta-llama/Llama-2-13b-hf", 40, 40, 40, 128, 13.0),
    "Llama-2-70B": _dense("meta-llama/Llama-2-70b-hf", 80, 64, 8, 128, 69.0),
    "Llama-3.2-1B": _dense("meta-llama/Llama-3.2-1B", 16, 32, 8, 64, 1.24),
    "Llama-3.2-3B": _dense("meta-llama/Llama-3.2-3B", 28, 24, 8, 128, 3.21),
    "Llama-3.1-8B": _dense("meta-llama/Llama-3.1-8B", 32, 32, 8, 128, 8.03),
    "Llama-3.1-70B": _dense("meta-llama/Llama-3.1-70B", 80, 64, 8, 128, 70.6),
    "Llama-3.3-70B": _dense("meta-llama/Llama-3.3-70B-Instruct", 80, 64, 8, 128, 70.6),
    "Llama-3.1-405B": _dense("meta-llama/Llama-3.1-405B", 126, 128, 8, 128, 405.0),
    "Mistral-7B-v0.3": _dense("mistralai/Mistral-7B-v0.3", 32, 32, 8, 128, 7.25),
    "Mistral-Small-24B": _dense("mistralai/Mistral-Small-24B-Instruct-2501", 40, 32, 8, 128, 23.6),
    "Mixtral-8x7B": _dense("mistralai/Mixtral-8x7B-v0.1", 32, 32, 8, 128, 12.9, 46.7),
    "Qwen2.5-7B": _dense("Qwen/Qwen2.5-7B", 28, 28, 4, 128, 7.62),
    "Qwen2.5-32B": _dense("Qwen/Qwen2.5-32B", 64, 40, 8, 128, 32.8),
    "Qwen2.5-72B": _dense("Qwen/Qwen2.5-72B", 80, 64, 8, 128, 72.7),
    "Qwen3-8B": _dense("Qwen/Qwen3-8B", 36, 32, 8, 128, 8.19),
    "Qwen3-32B": _dense("Qwen/Qwen3-32B", 64, 64, 8, 128, 32.8),
    "Qwen3-30B-A3B": _dense("Qwen/Qwen3-30B-A3B", 48, 32, 4, 128, 3.3, 30.5),
    "Qwen3-235B-A22B": _dense("Qwen/Qwen3-235B-A22B", 94, 64, 4, 128, 22.0, 235.0),
    "Gemma-2-9B": {
        **_dense("google/gemma-2-9b", 42, 16, 8, 256, 9.24),
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "Gemma-3-27B": {
        **_dense("google/gemma-3-27b-pt", 62, 32, 16, 128, 27.4),
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
    "gpt-oss-20b": {
        **_dense("openai/gpt-oss-20b", 24, 64, 8, 64, 3.6, 20.9),
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    "gpt-oss-120b": {
        **_dense("openai/gpt-oss-120b", 36, 64, 8, 64, 5.1, 116.8),
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    "DeepSeek-V2-Lite": {
        **_dense("deepseek-ai/DeepSeek-V2-Lite", 27, 16, 16, 128, 2.4, 15.7),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    "DeepSeek-V3": {
        **_dense("deepseek-ai/DeepSeek-V3", 61, 128, 128, 128, 37.0, 671.0),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    "DeepSeek-R1": {
        **_dense("deepseek-ai/DeepSeek-R1", 61, 128, 128, 128, 37.0, 671.0),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
    "Kimi-K2": {
        **_dense("moonshotai/Kimi-K2-Instruct", 61, 64, 64, 128, 32.0, 1000.0),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    },
}


def load_config(model: str | Path | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the config.json fields of a model given by name, config.json, folder or parsed config.

    Raises:
        ValueError: there is no such model; the message names some that are known.
    """
    if isinstance(model, dict):
        return str(model.get("_name_or_path") or model.get("model_type") or "model"), model
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        config = msgspec.json.decode(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError(f"{path} is not a model's config.json")
        return path.parent.name if path.name == "config.json" else path.stem, config
    known = find_known(str(model))
    if known is None:
        close = ", ".join(sorted(KNOWN_MODELS)[:8])
        raise ValueError(f"no model {str(model)!r}: give a config.json, a model's folder, or one of {close}, ...")
    return known, KNOWN_MODELS[known]


def hub_id(model: str) -> str:
    """What engines load a model by: its id on the Hugging Face hub where it is a well-known one, else its name."""
    known = KNOWN_MODELS.get(model)
    return model if known is None else str(known["source"]).removeprefix(HUB)


def find_known(name: str) -> str | None:
    """The name in KNOWN_MODELS that `name` means: case, organisation and separators do not matter."""

    def plain(text: str) -> str:
        return (
            "".join(c for c in text.rsplit("/", 1)[-1].lower() if c.isalnum())
            .replace("instruct", "")
            .replace("meta", "")
        )

    wanted = plain(name)
    for known in KNOWN_MODELS:
        if plain(known) == wanted:
            return known
    return None
