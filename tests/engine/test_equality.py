"""Tokens equal transformers' own greedy generation, whatever the state of the cache and whoever shares the batch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from caudex.engine.types import SamplingParams

from .conftest import TINY_CONFIGS
from .harness import Reference, assert_nothing_leaked, greedy, running_engine, serve, submit

BACKENDS = ("torch", "cpu")
INDEXES = ("radix", "hash")


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", sorted(TINY_CONFIGS))
def test_cold_hot_and_partly_hot(architecture: str, backend: str, tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model(architecture)
    reference = Reference(directory)
    rng = random.Random(1)
    shared = random_prompt(rng, 37)
    prompts = [shared, shared + random_prompt(rng, 11), shared[:29] + random_prompt(rng, 8), random_prompt(rng, 5)]
    with running_engine(
        model=str(directory), attention_backend=backend, num_blocks=64, max_num_batched_tokens=24, max_num_seqs=8
    ) as engine:
        for attempt in ("cold", "hot"):
            results = serve(engine, prompts, greedy(12))
            for prompt, result in zip(prompts, results, strict=True):
                assert result.tokens == reference.generate(prompt, 12), (attempt, len(prompt))
            cached = [result.last.num_cached_tokens for result in results]
        assert cached == [36, 47, 36, 4], "the second time, all but the last prompt token is cached"
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_eviction(index: str, backend: str, tiny_model: Callable[[str], Path]) -> None:
    """A pool of eight blocks cannot keep three prompts of five; each evicts what another left."""
    directory = tiny_model("llama")
    reference = Reference(directory)
    rng = random.Random(2)
    prompts = [random_prompt(rng, 70) for _ in range(3)]
    with running_engine(model=str(directory), attention_backend=backend, index=index, num_blocks=8) as engine:
        for prompt in [*prompts, prompts[1], *prompts]:
            result = submit(engine, prompt, greedy(20)).wait()
            assert result.tokens == reference.generate(prompt, 20)
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_after_preemption(index: str, backend: str, tiny_model: Callable[[str], Path]) -> None:
    """Two requests start well within the pool and grow until one must give way."""
    directory = tiny_model("qwen3")
    reference = Reference(directory)
    rng = random.Random(3)
    prompts = [random_prompt(rng, 9) for _ in range(3)]
    with running_engine(
        model=str(directory), attention_backend=backend, index=index, num_blocks=14, block_size=4, max_num_seqs=3
    ) as engine:
        results = serve(engine, prompts, greedy(30))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == reference.generate(prompt, 30)
        assert engine.stats().preemptions > 0, "this test is about preemption, and there was none"
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_prefix_caching(backend: str, tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model("gpt2")
    reference = Reference(directory)
    prompt = random_prompt(random.Random(4), 40)
    with running_engine(
        model=str(directory), attention_backend=backend, num_blocks=32, enable_prefix_caching=False
    ) as engine:
        for result in serve(engine, [prompt] * 3, greedy(10)) + serve(engine, [prompt], greedy(10)):
            assert result.tokens == reference.generate(prompt, 10)
            assert result.last.num_cached_tokens == 0
        assert engine.stats().num_free_blocks == 32


@pytest.mark.parametrize(("index", "backend"), [("radix", "cpu"), ("hash", "torch")])
def test_two_hundred_requests_and_cancellations_in_a_tiny_pool(
    index: str, backend: str, tiny_model: Callable[[str], Path]
) -> None:
    """Right answers and no leak, with a pool too small for two of the longer prompts and one in five cancelled."""
    directory = tiny_model("llama")
    reference = Reference(directory)
    rng = random.Random(5)
    stems = [random_prompt(rng, 60) for _ in range(4)]
    prompts = [rng.choice(stems)[: rng.randrange(1, 61)] + random_prompt(rng, rng.randrange(12)) for _ in range(12)]
    with running_engine(
        model=str(directory),
        attention_backend=backend,
        index=index,
        num_blocks=6,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    ) as engine:
        results = []
        for _ in range(200):
            prompt = rng.choice(prompts)
            results.append((prompt, submit(engine, prompt, greedy(rng.randrange(1, 10)))))
            if rng.random() < 0.2:
                engine.abort(rng.choice(results)[1].request_id)
            if rng.random() < 0.1:
                time.sleep(0.01)
        for prompt, result in results:
            expected = reference.generate(prompt, 10)
            last = result.wait().last
            assert last.finish_reason in ("length", "abort")
            assert result.tokens == expected[: len(result.tokens)]
            assert last.finish_reason == "abort" or last.num_output_tokens == len(result.tokens)
        assert engine.stats().requests_finished["length"] > 100
        assert_nothing_leaked(engine)


@pytest.mark.model
def test_smollm2(default_model: Path) -> None:
    reference = Reference(default_model, torch.float32)
    for backend in BACKENDS:
        with running_engine(dtype="float32", attention_backend=backend, num_blocks=64) as engine:
            question = engine.tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
            other = engine.tokenizer.render_chat([{"role": "user", "content": "What is the capital of Peru?"}])
            for prompts in ([question], [question, other]):
                for prompt, result in zip(prompts, serve(engine, prompts, greedy(8)), strict=True):
                    assert result.tokens == reference.generate(prompt, 8)
            assert "Paris" in serve(engine, [question], greedy(8))[0].text


@pytest.mark.model
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_smollm2_gives_the_same_bits_cold_and_hot(default_model: Path, kv_cache_dtype: str) -> None:
    """In bfloat16, as it is served: a long prompt whole, in chunks, hot, partly hot, and in company."""
    rng = random.Random(6)
    shared = [rng.randrange(1000, 40_000) for _ in range(300)]
    prompts = [shared + [rng.randrange(1000, 40_000) for _ in range(length)] for length in (3, 17, 40)]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logprobs=2, ignore_eos=True)
    seen: list[object] = []
    for settings in ({"enable_prefix_caching": False}, {"max_num_batched_tokens": 64}):
        with running_engine(
            model=str(default_model), num_blocks=100, kv_cache_dtype=kv_cache_dtype, **settings
        ) as engine:
            rounds = [[submit(engine, prompt, params).wait() for prompt in prompts]]
            rounds.append(serve(engine, prompts, params))
            seen += [[(result.tokens, result.logprobs) for result in results] for results in rounds]
    assert all(bits == seen[0] for bits in seen)
