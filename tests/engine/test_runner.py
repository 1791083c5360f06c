"""A model run through a paged pool, in chunks and in company, gives the logits of transformers' eager forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from caudex.engine.batch import StepBatch
from caudex.engine.config import EngineConfig
from caudex.engine.loading import locate_checkpoint
from caudex.engine.model import load_model
from caudex.engine.runner import ModelRunner
from caudex.engine.runner_choice import make_runner

from .conftest import TINY_CONFIGS

BLOCK_SIZE = 16
NUM_BLOCKS = 12
TABLES = [np.array([7, 2, 9], dtype=np.int32), np.array([4, 11, 0], dtype=np.int32)]


def load_runner(directory: Path, backend: str) -> ModelRunner:
    config = EngineConfig(model=str(directory), attention_backend=backend, num_threads=1)  # type: ignore[arg-type]
    loaded = load_model(locate_checkpoint(config.model), config, lambda stage, done, total: None)
    return make_runner(loaded, config, NUM_BLOCKS, NUM_BLOCKS * BLOCK_SIZE)


def step(tokens: list[np.ndarray], spans: list[tuple[int, int]]) -> StepBatch:
    """A batch that computes tokens `start:end` of each sequence, with the logits of all of them."""
    starts = np.cumsum([0] + [end - start for start, end in spans]).astype(np.int32)
    return StepBatch(
        token_ids=np.concatenate([row[start:end] for row, (start, end) in zip(tokens, spans, strict=True)]),
        positions=np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in spans]),
        query_starts=starts,
        context_lens=np.array([end for _, end in spans], dtype=np.int32),
        block_tables=TABLES[: len(spans)],
        adapters=[None] * len(spans),
        logit_rows=np.arange(starts[-1], dtype=np.int32),
    )


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("architecture", sorted(TINY_CONFIGS))
def test_logits_equal_the_eager_forward(architecture: str, backend: str, tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model(architecture)
    rng = np.random.default_rng(3)
    tokens = [rng.integers(0, 256, 41, dtype=np.int32), rng.integers(0, 256, 37, dtype=np.int32)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = [model(torch.from_numpy(row)[None].long()).logits[0] for row in tokens]
    runner = load_runner(directory, backend)
    for spans in [[(0, 19), (0, 1)], [(19, 20), (1, 36)], [(20, 41), (36, 37)]]:
        logits = runner.run(step(tokens, spans))
        wanted = torch.cat([row[start:end] for row, (start, end) in zip(expected, spans, strict=True)])
        torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-4)
