"""A model run through a paged pool, in chunks and in company, gives the logits of transformers' eager forward."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from caudex.engine.batch import StepBatch
from caudex.engine.config import EngineConfig
from caudex.engine.loading import ignore_progress, locate_checkpoint
from caudex.engine.model import LoadedModel, load_model
from caudex.engine.runner import ModelRunner
from caudex.engine.runner_choice import make_runner

from .conftest import TINY_CONFIGS

BLOCK_SIZE = 16
NUM_BLOCKS = 12
TABLES = [np.array([7, 2, 9], dtype=np.int32), np.array([4, 11, 0], dtype=np.int32)]


def configure(directory: Path, backend: str) -> EngineConfig:
    return EngineConfig(model=str(directory), attention_backend=backend, num_threads=1)  # type: ignore[arg-type]


def load(directory: Path, backend: str) -> LoadedModel:
    return load_model(locate_checkpoint(str(directory)), configure(directory, backend), ignore_progress)


def load_runner(directory: Path, backend: str) -> ModelRunner:
    config = configure(directory, backend)
    return make_runner(load(directory, backend), config, NUM_BLOCKS, NUM_BLOCKS * BLOCK_SIZE)


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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_weights_are_the_same_however_they_are_saved(
    architecture: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """In one file, in several, and pickled: the first two are read without transformers' model code."""
    whole, shards, pickled = tiny_model(architecture), tmp_path / "shards", tmp_path / "pickled"
    for folder in (shards, pickled):
        shutil.copytree(whole, folder)
        (folder / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.save_pretrained(shards, max_shard_size="40KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    tokens = [np.random.default_rng(3).integers(0, 256, 29, dtype=np.int32)]
    logits = [load_runner(folder, "auto").run(step(tokens, [(0, 29)])) for folder in (whole, shards, pickled)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_only_what_the_fused_runner_serves_is_read_without_transformers_model(
    tiny_model: Callable[[str], Path],
) -> None:
    assert load(tiny_model("qwen3"), "auto").module is None
    assert load(tiny_model("qwen3"), "torch").module is not None
    assert load(tiny_model("gemma"), "auto").module is not None
