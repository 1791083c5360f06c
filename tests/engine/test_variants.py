"""The many ways in which two models of one architecture differ: each is served as transformers has it, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.loading import UnsupportedModelError
from caudex.engine.types import SamplingParams

from .conftest import COMMON, GROUPED, VOCAB_SIZE, byte_tokenizer
from .harness import Reference, running_engine, serve

GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.3}
FULL = {"layer_types": ["full_attention"] * 2}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


def rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


ROTATIONS = {
    "theta": rope("default", rope_theta=500.0),
    "linear": rope("linear", factor=2.0),
    "dynamic": rope("dynamic", factor=2.0),
    "llama3": rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=128),
    "yarn with factors": rope("yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.7, mscale_all_dim=0.9),
    "partial": rope("default", partial_rotary_factor=0.5),
}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one KV head": {"num_key_value_heads": 1},
    "heads of 24": {"head_dim": 24},
    "padded vocabulary": {"vocab_size": 333},
    "gelu": {"hidden_act": "gelu"},
    "epsilon": {"rms_norm_eps": 0.3},
}
VARIANTS: dict[str, Callable[[], Any]] = {
    **{
        f"llama, {name}": lambda o=others: transformers.LlamaConfig(**GROUPED, **o)
        for name, others in ROTATIONS.items()
    },
    **{
        f"{kind.model_type}, {name}": lambda kind=kind, o=others: kind(**{**GROUPED, **o})
        for kind in (transformers.LlamaConfig, transformers.Qwen3Config)
        for name, others in SHAPES.items()
    },
    "qwen2, tied, no window": lambda: transformers.Qwen2Config(
        **COMMON, num_key_value_heads=2, tie_word_embeddings=True, sliding_window=16, use_sliding_window=False
    ),
    "qwen2, no layer slides": lambda: transformers.Qwen2Config(
        **COMMON, num_key_value_heads=2, sliding_window=16, use_sliding_window=True, max_window_layers=2
    ),
    "mistral, a window never reached": lambda: transformers.MistralConfig(**GROUPED, sliding_window=4096),
    "gpt2, scaled by layer": lambda: transformers.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt2, unscaled": lambda: transformers.GPT2Config(**GPT2, scale_attn_weights=False),
    "gpt2, wide, untied": lambda: transformers.GPT2Config(**GPT2, n_inner=100, tie_word_embeddings=False),
    "gemma2, a window never reached": lambda: transformers.Gemma2Config(**GROUPED, sliding_window=512),
    "gemma2, scaled": lambda: transformers.Gemma2Config(**GROUPED, **FULL, query_pre_attn_scalar=77),
    "gemma3, a window never reached": lambda: transformers.Gemma3TextConfig(**GROUPED, sliding_window=512),
    "olmo, clipped": lambda: transformers.OlmoConfig(**COMMON, clip_qkv=0.5),
    "olmo3": lambda: transformers.Olmo3Config(**COMMON, sliding_window=512),
    "granite, multipliers": lambda: transformers.GraniteConfig(
        **COMMON,
        num_key_value_heads=2,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "phi, normed heads": lambda: transformers.PhiConfig(**COMMON, qk_layernorm=True),
    "smollm3, a layer without rotation": lambda: transformers.SmolLM3Config(
        **COMMON, num_key_value_heads=2, no_rope_layers=[1, 0]
    ),
    "experts": lambda: transformers.MixtralConfig(
        **COMMON, num_key_value_heads=2, num_local_experts=4, sliding_window=None
    ),
    "sinks": lambda: transformers.GptOssConfig(
        **GROUPED, num_local_experts=4, sliding_window=512, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "a view of what attention gives": lambda: transformers.JetMoeConfig(**COMMON, num_local_experts=4),
}


def save(config: Any, directory: Path, **options: Any) -> Path:
    """A random model whose biases and norms are not what they begin as, so that leaving one out is seen."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.3)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(directory, **options)
    byte_tokenizer().save_pretrained(directory)
    return directory


def assert_equals_transformers(directory: Path, **settings: Any) -> None:
    """Greedy tokens, and log-probabilities but for rounding, of a long prompt in chunks and of a short one."""
    reference = Reference(directory)
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (90, 5)]
    with running_engine(
        model=str(directory), num_blocks=64, max_num_batched_tokens=24, max_num_seqs=8, **settings
    ) as engine:
        results = serve(engine, prompts, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == reference.generate(prompt, 9)
            expected = reference.logprobs(prompt, result.tokens)
            assert [entry.logprob for entry in result.logprobs] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_served_as_transformers_has_it(variant: str, tmp_path: Path) -> None:
    assert_equals_transformers(save(VARIANTS[variant](), tmp_path))


def test_a_checkpoint_in_many_files(tmp_path: Path) -> None:
    """Saved in bfloat16, as large ones are, with an index that says where each tensor is; served in float32."""
    directory = save(VARIANTS["llama, biases"](), tmp_path, dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 3
    assert_equals_transformers(directory, dtype="float32")


def test_angles_that_change_with_the_length_are_refused_unless_no_sequence_is_so_long(tmp_path: Path) -> None:
    directory = save(transformers.LlamaConfig(**GROUPED, rope_parameters=LONG_ROPE), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"'longrope'.*more than 64 tokens.*--max-model-len 64 or less"):
        Engine.load(EngineConfig(model=str(directory), num_blocks=64))
    reference = Reference(directory)
    prompt = list(range(30))
    with running_engine(model=str(directory), num_blocks=64, max_model_len=64) as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        assert serve(engine, [prompt], greedy)[0].tokens == reference.generate(prompt, 9)


def test_a_configuration_that_lies_is_told_in_a_sentence(tmp_path: Path) -> None:
    directory = save(transformers.PhiConfig(**COMMON, **rope("default", partial_rotary_factor=0.25)), tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"\(PhiForCausalLM\) cannot compute 3 tokens"):
        Engine.load(EngineConfig(model=str(directory), num_blocks=64))
