"""Models that cannot be served are refused with a sentence that says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from caudex.engine.attention import ATTENTION_NAME, register_attention
from caudex.engine.loading import UnsupportedModelError
from caudex.engine.support import check_config, probe_model

REFUSED: dict[str, tuple[Any, str]] = {
    "sliding": (transformers.MistralConfig(sliding_window=128), "sliding-window attention over 128 tokens"),
    "some layers slide": (transformers.Gemma2Config(), "sliding-window"),
    "mamba": (transformers.MambaConfig(), "recurrent state"),
    "jamba": (transformers.JambaConfig(), "recurrent state"),
    "linear layers": (transformers.Qwen3NextConfig(), "linear_attention|recurrent state"),
    "bloom": (transformers.BloomConfig(), "_supports_attention_backend"),
    "falcon": (transformers.FalconConfig(alibi=True), "_supports_attention_backend"),
    "encoder and decoder": (transformers.T5Config(), "encoder-decoder"),
    "no language model": (transformers.ViTConfig(), "no causal language model"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused_by_configuration(case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_config(config, "my-model", None)
    assert "my-model" in str(caught.value)


def test_a_window_that_is_never_reached_is_accepted() -> None:
    config = transformers.MistralConfig(sliding_window=128)
    check_config(config, "my-model", 128)
    check_config(transformers.Qwen2Config(sliding_window=128, use_sliding_window=False), "my-model", None)
    with pytest.raises(UnsupportedModelError, match="--max-model-len 128"):
        check_config(config, "my-model", 129)


def test_an_encoder_in_a_decoders_clothes_is_refused_by_the_probe() -> None:
    register_attention()
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with pytest.raises(UnsupportedModelError, match="both directions"):
        probe_model(model, "bert", None)


def test_the_probe_knows_each_layers_shape() -> None:
    register_attention()
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    layers = probe_model(model, "qwen", None).layers()
    assert [(layer.num_heads, layer.num_kv_heads, layer.key_size) for layer in layers] == [(4, 2, 8)] * 3
    assert sum(layer.bytes_per_token(torch.bfloat16) for layer in layers) == 3 * 2 * 8 * 2 * 2
