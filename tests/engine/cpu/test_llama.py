"""The fused runner: transformers' tokens, and logits whose bits depend on the prompt alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from caudex.engine.cpu import KvPool, LlamaRunner, QuantizedBits, ThreadPool, available_isas, why_unsupported

from .attention_twin import blocks_for

THREADS = ThreadPool(2)
MAX_LEN = 512
TINY = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": MAX_LEN,
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "llama-tied-biased": LlamaConfig(**TINY, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama3-rope": LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**TINY, sliding_window=None),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY),
}


@cache
def tiny_model(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()


def pool_for(config: Any, dtype: torch.dtype, *, isa: str = "auto", threads: ThreadPool = THREADS) -> KvPool:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvPool(
        config.num_hidden_layers, 200, 16, config.num_key_value_heads, head_dim, dtype, threads=threads, isa=isa
    )


BITS: tuple[QuantizedBits, ...] = (8, 4)


class Sequences:
    """Runs steps of named token lists through a runner, each over blocks of its own."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        *,
        isa: str = "auto",
        num_threads: int = 2,
        bits: QuantizedBits | None = None,
    ) -> None:
        self.pool = pool_for(model.config, dtype, isa=isa, threads=ThreadPool(num_threads))
        self.runner = LlamaRunner(model.config, model.state_dict(), self.pool, MAX_LEN, bits=bits)
        self.query_heads = model.config.num_attention_heads

    def step(self, parts: list[tuple[list[int], int, np.ndarray]], adapters: list[int] | None = None) -> torch.Tensor:
        """parts: tokens of the whole sequence, how many are computed already, block table. Returns all logits."""
        new = [tokens[done:] for tokens, done, _ in parts]
        batch = self.pool.batch(
            [table for *_, table in parts],
            np.array([len(tokens) for tokens in new]),
            np.array([len(tokens) for tokens, *_ in parts]),
            num_query_heads=self.query_heads,
        )
        token_ids = np.concatenate([np.array(tokens, dtype=np.int32) for tokens in new])
        rows = np.arange(len(token_ids), dtype=np.int32)
        return self.runner.forward(token_ids, batch, rows, np.array(adapters or [], dtype=np.int32))


def greedy(sequences: Sequences, prompt: list[int], count: int, adapter: int = -1) -> list[int]:
    tokens, done = list(prompt), 0
    table = blocks_for(len(prompt) + count, 16)
    for _ in range(count):
        logits = sequences.step([(tokens, done, table)], [adapter])
        done = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def transformers_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return list(output[0, len(prompt) :].tolist())


def random_tokens(count: int, seed: int, vocab_size: int = 131) -> list[int]:
    return list(np.random.default_rng(seed).integers(0, vocab_size, count).tolist())


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_transformers(name: str, isa: str) -> None:
    model = tiny_model(name, torch.float32)
    sequences = Sequences(model, torch.float32, isa=isa)
    for seed, length in enumerate([1, 16, 77]):
        prompt = random_tokens(length, seed)
        assert greedy(sequences, prompt, 24) == transformers_greedy(model, prompt, 24)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_close_to_transformers(name: str) -> None:
    model = tiny_model(name, torch.float32)
    tokens = random_tokens(90, 5)
    logits = Sequences(model, torch.float32).step([(tokens, 0, blocks_for(90, 16))])
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_errs_less_than_transformers_does(name: str) -> None:
    """Against the same weights in float32: the residual stream is not rounded here."""
    model = tiny_model(name, torch.bfloat16)
    tokens = torch.tensor(random_tokens(90, 6))
    logits = Sequences(model, torch.bfloat16).step([(tokens.tolist(), 0, blocks_for(90, 16))])
    exact = tiny_model_widened(name)
    with torch.no_grad():
        expected = exact(tokens[None]).logits[0]
        theirs = model(tokens[None]).logits[0].float()
    assert (logits - expected).square().mean() < (theirs - expected).square().mean()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_logits_are_near_the_models_own(name: str, dtype: torch.dtype) -> None:
    model, tokens = tiny_model(name, dtype), random_tokens(90, 7)
    exact, in_8_bits, in_4_bits = (
        Sequences(model, dtype, bits=bits).step([(tokens, 0, blocks_for(90, 16))]) for bits in (None, *BITS)
    )
    size, errors = exact.square().mean(), [(near - exact).square().mean() for near in (in_8_bits, in_4_bits)]
    assert 0 < errors[0] < 0.02 * size
    assert errors[0] < errors[1] < 0.6 * size, (
        "weights of noise carry every error on; unrelated logits would differ by 2"
    )


@cache
def tiny_model_widened(name: str) -> Any:
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    model.load_state_dict({key: value.float() for key, value in tiny_model(name, torch.bfloat16).state_dict().items()})
    return model


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["llama-tied-biased", "qwen3"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    isa=st.sampled_from(available_isas()),
    num_threads=st.sampled_from([1, 2, 3]),
    bits=st.sampled_from([None, *BITS]),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    data=st.data(),
)
def test_logits_have_the_same_bits_in_any_batch_and_chunking(
    name: str,
    dtype: torch.dtype,
    isa: str,
    num_threads: int,
    bits: QuantizedBits | None,
    lengths: list[int],
    data: st.DataObject,
) -> None:
    """Prompts that share a prefix of random length, in chunks, batches and shared blocks, against each one whole."""
    model = tiny_model(name, dtype)
    alone = Sequences(model, dtype, isa=isa, num_threads=1, bits=bits)
    shared = data.draw(st.sampled_from([0, 16, 64, 160]))
    prefix = random_tokens(shared, 100)
    prompts = [prefix + random_tokens(length, i) for i, length in enumerate(lengths)]
    whole = [alone.step([(prompt, 0, blocks_for(len(prompt), 16))]) for prompt in prompts]

    together = Sequences(model, dtype, isa=isa, num_threads=num_threads, bits=bits)
    prefix_table = blocks_for(shared, 16)
    if shared:
        together.step([(prefix, 0, prefix_table)])
    free, tables = len(prefix_table), []
    for length in lengths:
        own = blocks_for(length, 16, free)
        free += len(own)
        tables.append(np.concatenate([prefix_table, own]))
    done = [shared] * len(prompts)
    while any(d < len(prompt) for d, prompt in zip(done, prompts, strict=True)):
        parts, expected = [], []
        for i, prompt in enumerate(prompts):
            left = len(prompt) - done[i]
            if left:
                end = done[i] + data.draw(st.sampled_from([1, min(left, 9), left]))
                parts.append((prompt[:end], done[i], tables[i]))
                expected.append(whole[i][done[i] : end])
                done[i] = end
        assert torch.equal(together.step(parts), torch.cat(expected))


def test_only_the_rows_asked_for() -> None:
    sequences = Sequences(tiny_model("llama", torch.float32), torch.float32)
    tokens, table = random_tokens(40, 1), blocks_for(40, 16)
    everything = sequences.step([(tokens, 0, table)])
    batch = sequences.pool.batch([table], np.array([40]), np.array([40]), num_query_heads=6)
    token_ids = np.array(tokens, dtype=np.int32)
    some = sequences.runner.forward(token_ids, batch, np.array([39, 3], dtype=np.int32))
    assert torch.equal(some, everything[[39, 3]])
    assert sequences.runner.forward(token_ids, batch, np.array([], dtype=np.int32)).shape == (0, 131)


@pytest.mark.parametrize(
    ("tokens", "logit_row", "length", "message"),
    [([131], 0, 1, "token 131"), ([-1], 0, 1, "token -1"), ([5], 1, 1, "logit row 1"), ([5], 0, 513, "position 512")],
)
def test_a_step_that_cannot_be_is_refused(tokens: list[int], logit_row: int, length: int, message: str) -> None:
    sequences = Sequences(tiny_model("llama", torch.float32), torch.float32)
    batch = sequences.pool.batch([blocks_for(length, 16)], np.array([1]), np.array([length]), num_query_heads=6)
    with pytest.raises(ValueError, match=message):
        sequences.runner.forward(np.array(tokens, dtype=np.int32), batch, np.array([logit_row], dtype=np.int32))


def test_models_it_cannot_run_are_named() -> None:
    assert why_unsupported(CONFIGS["qwen3"], MAX_LEN) is None
    assert "gpt2" in str(why_unsupported(GPT2Config(), MAX_LEN))
    assert "sliding window of 64" in str(why_unsupported(MistralConfig(**TINY, sliding_window=64), MAX_LEN))
    assert why_unsupported(MistralConfig(**TINY, sliding_window=512), MAX_LEN) is None
    assert "gelu" in str(why_unsupported(LlamaConfig(**TINY, hidden_act="gelu"), MAX_LEN))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    assert "dynamic" in str(why_unsupported(LlamaConfig(**TINY, rope_parameters=dynamic), MAX_LEN))
    too_few_layers = KvPool(2, 4, 16, 2, 12, torch.float32, threads=THREADS)
    model = tiny_model("llama", torch.float32)
    with pytest.raises(ValueError, match="KV pool"):
        LlamaRunner(model.config, model.state_dict(), too_few_layers, MAX_LEN)


def test_weights_that_are_not_as_the_configuration_says_are_refused() -> None:
    model = tiny_model("qwen2", torch.float32)
    name = "model.layers.1.self_attn.k_proj"
    weights = model.state_dict()
    for broken, message in [
        ({f"{name}.weight": weights[f"{name}.weight"][:-1]}, f"{name}.weight is torch.float32 of shape"),
        ({f"{name}.weight": weights[f"{name}.weight"].int()}, f"{name}.weight is torch.int32"),
        ({f"{name}.bias": weights[f"{name}.bias"][:-1]}, f"{name}.bias has shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            LlamaRunner(model.config, {**weights, **broken}, pool_for(model.config, torch.float32), MAX_LEN)
    without = {key: weight for key, weight in weights.items() if key != f"{name}.weight"}
    with pytest.raises(ValueError, match=f"has no {name}.weight"):
        LlamaRunner(model.config, without, pool_for(model.config, torch.float32), MAX_LEN)


@pytest.mark.model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smollm2_tokens_equal_transformers(dtype: torch.dtype) -> None:
    from caudex.engine.loading import locate_checkpoint

    folder = locate_checkpoint(None).directory
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sequences = Sequences(model, dtype)
    for question in ["Tell me three facts about the sea.", "What is the capital of France?"]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer.encode(text)
        expected = transformers_greedy(model, prompt, 24)
        assert greedy(sequences, prompt, len(expected)) == expected
