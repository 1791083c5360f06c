"""A tiny random model for tests that need one. PyTorch is imported by those that do, and by no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "<role>{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<role>{% endif %}"
)


def byte_tokenizer() -> Any:
    """A transformers tokenizer with one token a byte, and three special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<bos>", "<eos>", "<role>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


def save_tiny_llama(directory: Path, max_position_embeddings: int) -> Path:
    """Save a tiny random Llama in float32 whose greedy answers vary with every token of the prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=260, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=max_position_embeddings, initializer_range=0.3,
        bos_token_id=256, eos_token_id=257, pad_token_id=257,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context of 512 tokens."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), 512)


@pytest.fixture(scope="session")
def long_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a context of 16,384 tokens."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama-long"), 16_384)
