"""Tokens equal transformers' own greedy generation, whatever the state of the cache and whoever shares the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import TINY_CONFIGS
from .harness import Reference, assert_nothing_leaked, greedy, running_engine, serve

BACKENDS = ("torch", "cpu")


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
