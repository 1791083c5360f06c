from __future__ import annotations

import json
from pathlib import Path

import pytest

from caudex.analysis.curves import parse_capacity
from caudex.sizing.gpus import GPUS, find_gpu
from caudex.sizing.kv_pool import pool_blocks_on
from caudex.sizing.kv_size import kv_size
from caudex.sizing.models import KNOWN_MODELS


@pytest.mark.parametrize(
    ("model", "kib"),
    [
        ("Llama-2-70B", 320),
        ("meta-llama/Llama-3.1-8B-Instruct", 128),
        ("deepseek-ai/DeepSeek-V3", 68.625),
        ("Llama-2-7B", 512),
        ("SmolLM2-135M-Instruct", 22.5),
        ("Qwen2.5-7B", 56),
    ],
)
def test_well_known_models(model: str, kib: float) -> None:
    assert kv_size(model).bytes_per_cached_token == kib * 1024


def test_a_config_file_says_the_same_as_the_table(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = kv_size(tmp_path)
    assert size.bytes_per_cached_token == 128 * 1024
    assert size.attention == "grouped-query"
    assert size.parameters == pytest.approx(8.03e9, rel=0.01)


def test_quantised_kv_and_tensor_parallel() -> None:
    assert kv_size("Llama-3.1-8B", "fp8").bytes_per_cached_token == 64 * 1024
    assert kv_size("Llama-3.1-8B", "q8_0").bytes_per_cached_token == 68 * 1024
    assert kv_size("Llama-3.1-8B", tensor_parallel=4).bytes_per_cached_token == 32 * 1024
    assert kv_size("Llama-3.1-8B", tensor_parallel=16).bytes_per_cached_token == 16 * 1024
    assert kv_size("DeepSeek-V3", tensor_parallel=8) == kv_size("DeepSeek-V3")


def test_sliding_windows_are_counted_apart() -> None:
    size = kv_size("Gemma-3-27B")
    assert (size.full_layers, size.sliding_layers, size.sliding_window) == (10, 52, 1024)
    long = size.bytes_of_prefix(100_000)
    assert long == 100_000 * size.bytes_per_token + 1024 * size.sliding_bytes_per_token


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "cohere2"])
def test_layers_are_counted_as_transformers_counts_them(model_type: str) -> None:
    """From what a config.json of that type says, with and without the list of layer types."""
    models = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = models.CONFIG_MAPPING[model_type]()
    kinds = config.layer_types
    fields = config.to_dict()
    listed = kv_size(fields)
    assert listed.full_layers == kinds.count("full_attention")
    assert listed.state_layers == kinds.count("linear_attention")
    assert listed.sliding_layers == len(kinds) - listed.full_layers - listed.state_layers
    del fields["layer_types"]
    told = {**fields, "full_attention_interval": 4} if model_type == "qwen3_next" else fields
    told = {**told, "sliding_window_pattern": 4} if model_type == "cohere2" else told
    assert kv_size(told) == listed


def test_layers_without_kv_are_left_out() -> None:
    config = {
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    }  # fmt: skip
    size = kv_size(config)
    assert (size.full_layers, size.state_layers) == (2, 2)
    assert size.bytes_per_token == 2 * 2 * 64 * 2 * 2


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        ("no-such-model", "bf16", "no-such-model"),
        ("Llama-2-7B", "bf17", "bf17"),
        ({"a": 1}, "bf16", "num_hidden_layers"),
    ],
)
def test_what_is_not_known_is_named(model: object, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv_size(model, dtype)  # type: ignore[arg-type]


def test_gpus_by_any_spelling_and_what_fits() -> None:
    assert find_gpu("a100-80gb") is GPUS["A100-80GB"]
    with pytest.raises(ValueError, match="GTX"):
        find_gpu("GTX")
    blocks = pool_blocks_on("H100", kv_size("Llama-3.1-8B"), 16)
    assert blocks == int((0.9 * 80 * 2**30 - 2 * 8.03e9) // (128 * 1024 * 16))
    assert pool_blocks_on("L4", kv_size("Llama-3.1-70B"), 16) is None


def test_capacities_in_blocks_and_in_bytes() -> None:
    kv = kv_size("Llama-3.1-8B")
    assert parse_capacity("12_000", 16, None) == 12_000
    assert parse_capacity("2GiB", 16, kv) == 1024
    with pytest.raises(ValueError, match="--model"):
        parse_capacity("2GiB", 16, None)
    with pytest.raises(ValueError, match="'lots'"):
        parse_capacity("lots", 16, kv)


def test_every_row_names_the_page_it_is_from() -> None:
    for source in (*(gpu.source for gpu in GPUS.values()), *(fields["source"] for fields in KNOWN_MODELS.values())):
        assert source.startswith("https://")
