"""Requests with different adapters, and without, share a batch and get what peft computes for each alone."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from caudex.engine.adapter import read_adapter
from caudex.engine.config import EngineConfig
from caudex.engine.cpu import ThreadPool, pack_linear_layers
from caudex.engine.engine import Engine
from caudex.engine.loading import UnsupportedModelError
from caudex.engine.lora import LoraAdapters, adapter_matrices

from .harness import Reference, assert_nothing_leaked, greedy, running_engine, submit

peft = pytest.importorskip("peft")


LLAMA_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [("llama", "cpu"), ("mistral", "cpu"), ("qwen2", "cpu"), ("qwen3", "cpu"), ("llama", "torch"), ("gpt2", "cpu")],
)
def test_adapters_share_a_batch(
    architecture: str, backend: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model(architecture)
    targets = ["c_attn", "c_proj"] if architecture == "gpt2" else LLAMA_PROJECTIONS
    of_their_own = {"rank_pattern": {"layers.1.mlp.up_proj": 7, "k_proj": 1}, "alpha_pattern": {"1.mlp.[a-z]+_proj": 3}}
    folders = {
        "law": save_adapter(base, tmp_path / "law", 1, r=4, lora_alpha=8, target_modules=targets, **of_their_own),
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


def test_adapters_stay_exact_where_the_base_weights_are_quantized(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model("gpt2")
    folder = save_adapter(base, tmp_path / "law", 1, r=4, target_modules=["c_attn"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    LoraAdapters.load(model, [read_adapter("law", folder)])
    adapted = model.transformer.h[0].attn.c_attn
    x = torch.randn(5, 48)
    exact, base_layer = adapted.up["adapter0"](adapted.down["adapter0"](x)), adapted.base(x)
    pack_linear_layers(model, ThreadPool(1), bits=8, exact=adapter_matrices(model))
    torch.testing.assert_close(adapted.up["adapter0"](adapted.down["adapter0"](x)), exact)
    error = (adapted.base(x) - base_layer).abs().max()
    assert 0 < error < 0.1 * base_layer.abs().max(), "the base weights are quantized, and near"


def with_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "of another kind": (lambda folder: with_config(folder, peft_type="IA3"), "of type IA3; only LORA"),
    "with more than matrices": (lambda folder: with_config(folder, use_dora=True), "uses use_dora"),
    "for some tokens": (
        lambda folder: with_config(folder, alora_invocation_tokens=[1]),
        "uses alora_invocation_tokens",
    ),
    "without alpha": (lambda folder: with_config(folder, lora_alpha=None), "has lora_alpha None; expected a number"),
    "with odd patterns": (lambda folder: with_config(folder, alpha_pattern={"(": 1}), "is no list of expressions"),
    "without a configuration": (lambda folder: (folder / "adapter_config.json").unlink(), "it is not a LoRA adapter"),
    "with no JSON": (lambda folder: (folder / "adapter_config.json").write_text("[1"), "is no JSON object"),
    "with a list": (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "is no JSON object"),
    "without weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model"),
    "pickled": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "pickled weights are not loaded",
    ),
    "cut off": (lambda folder: os.truncate(folder / "adapter_model.safetensors", 500), "are damaged"),
    "empty": (lambda folder: with_tensors(folder, dict.clear), "pairs of lora_A and lora_B: none at all"),
    "with another layer's norm": (
        lambda folder: with_tensors(folder, lambda tensors: tensors.update(norm=torch.ones(1))),
        "pairs of lora_A and lora_B: norm",
    ),
    "without half of a pair": (
        lambda folder: with_tensors(folder, lambda tensors: tensors.pop(f"{QUERY}.lora_B.weight")),
        rf"damaged: {QUERY}.lora_A.weight and lora_B.weight have shapes \(2, 48\) and None",
    ),
    "of two ranks": (
        lambda folder: with_tensors(
            folder, lambda tensors: tensors.update({f"{QUERY}.lora_B.weight": torch.ones(64, 3)})
        ),
        r"have shapes \(2, 48\) and \(64, 3\)",
    ),
    "of whole numbers": (
        lambda folder: with_tensors(
            folder, lambda tensors: tensors.update({f"{QUERY}.lora_A.weight": torch.ones(2, 48, dtype=torch.int8)})
        ),
        "in torch.int8 and torch.float32; expected floats",
    ),
    "of another width": (
        lambda folder: with_tensors(
            folder, lambda tensors: tensors.update({f"{QUERY}.lora_A.weight": torch.ones(2, 47)})
        ),
        r"q_proj.lora_A.weight has shape \(2, 47\); the model served takes \(2, 48\)",
    ),
}


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_adapters_that_cannot_be_served_say_why(
    backend: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    plain = save_adapter(base, tmp_path / "plain", 1, r=2, target_modules=["q_proj"])

    def load(model: Path, folder: Path) -> None:
        Engine.load(
            EngineConfig(model=str(model), num_blocks=8, attention_backend=backend, lora_adapters={"a": folder})
        )

    for name, (damage, message) in HOSTILE.items():
        folder = shutil.copytree(plain, tmp_path / name)
        damage(folder)
        with pytest.raises((UnsupportedModelError, FileNotFoundError), match=message):
            load(base, folder)
    with pytest.raises(UnsupportedModelError, match=rf"made for {base}: the model served has no linear layer model"):
        load(tiny_model("gpt2"), plain)
    head = save_adapter(base, tmp_path / "head", 1, r=2, target_modules=["lm_head"])
    with pytest.raises(UnsupportedModelError, match="changes the output layer"):
        load(base, head)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load(base, tmp_path / "nowhere")
