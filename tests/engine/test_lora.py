"""Requests with different adapters, and without, share a batch and get what peft computes for each alone."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.loading import UnsupportedModelError

from .harness import Reference, assert_nothing_leaked, greedy, running_engine, submit

peft = pytest.importorskip("peft")


def save_adapter(base: Path, folder: Path, seed: int, **settings: object) -> Path:
    """A LoRA adapter with random matrices, large enough to change every answer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    adapted.save_pretrained(folder)
    return folder


def reference(base: Path, adapter: Path | None, scratch: Path) -> Reference:
    """transformers' generation with the adapter merged into the weights by peft."""
    if adapter is None:
        return Reference(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(scratch)
    return Reference(scratch)


@pytest.mark.parametrize(("architecture", "backend"), [("llama", "cpu"), ("llama", "torch"), ("gpt2", "cpu")])
def test_adapters_share_a_batch(
    architecture: str, backend: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model(architecture)
    targets = ["c_attn", "c_proj"] if architecture == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    folders = {
        "law": save_adapter(base, tmp_path / "law", 1, r=4, lora_alpha=8, target_modules=targets),
        "verse.v2": save_adapter(
            base, tmp_path / "verse", 2, r=2, lora_alpha=4, use_rslora=True, target_modules=targets[:1]
        ),
    }
    references = {
        name: reference(base, folders.get(name or ""), tmp_path / f"merged-{name}") for name in (None, *folders)
    }
    rng = random.Random(4)
    shared = [rng.randrange(256) for _ in range(30)]
    prompts = [shared + [rng.randrange(256)] * length for length in (2, 5)]
    with running_engine(
        model=str(base),
        attention_backend=backend,
        lora_adapters=folders,
        num_blocks=64,
        max_num_seqs=8,
        max_num_batched_tokens=20,
    ) as engine:
        for attempt in ("cold", "hot"):
            results = {
                (name, index): submit(engine, prompt, greedy(8), adapter=name)
                for index, prompt in enumerate(prompts)
                for name in (None, *folders)
            }
            for (name, index), result in results.items():
                assert result.wait().tokens == references[name].generate(prompts[index], 8), (attempt, name)
        for (_, index), result in results.items():
            assert result.last.num_cached_tokens == len(prompts[index]) - 1
        assert len({tuple(results[name, 0].tokens) for name in (None, *folders)}) == 3, "an adapter changes nothing"
        with pytest.raises(ValueError, match=r"no adapter 'prose'; loaded are: law, verse\.v2"):
            submit(engine, shared, greedy(1), adapter="prose")
        assert_nothing_leaked(engine)


def test_adapters_that_cannot_be_served_say_why(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_model("llama")
    plain = save_adapter(base, tmp_path / "plain", 1, r=2, target_modules=["q_proj"])
    changes = {
        "DoRA": ({"use_dora": True}, "use_dora"),
        "no LoRA": ({"peft_type": "IA3"}, "of type IA3"),
    }
    for name, (change, message) in changes.items():
        folder = tmp_path / name
        shutil.copytree(plain, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedModelError, match=message):
            Engine.load(EngineConfig(model=str(base), num_blocks=8, lora_adapters={"a": folder}))
    with pytest.raises(UnsupportedModelError, match="was made for"):
        Engine.load(EngineConfig(model=str(tiny_model("gpt2")), num_blocks=8, lora_adapters={"a": plain}))
