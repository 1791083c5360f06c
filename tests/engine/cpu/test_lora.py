"""Adapters in the fused runner: the tokens of merged weights, and bits that no company changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.engine.adapter import Adapter, LoraWeights
from caudex.engine.cpu import QuantizedBits, available_isas
from caudex.engine.cpu.llama import linear_shapes
from caudex.engine.loading import UnsupportedModelError

from .attention_twin import blocks_for
from .test_llama import BITS, CONFIGS, Sequences, greedy, random_tokens, tiny_model, transformers_greedy

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapter(config: Any, seed: int, ranks: dict[str, int]) -> Adapter:
    """An adapter for the projections in `ranks`, of the rank given for each, in every layer."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, (outputs, inputs) in linear_shapes(config).items():
        if rank := ranks.get(name.rpartition(".")[2]):
            down = torch.randn(rank, inputs, generator=generator)
            up = torch.randn(outputs, rank, generator=generator)
            layers[name] = LoraWeights(down, up, 0.05 / rank)
    return Adapter("random", None, layers)


@cache
def merged_model(name: str, seed: int, ranks: tuple[tuple[str, int], ...]) -> Any:
    model = tiny_model.__wrapped__(name, torch.float32)
    for layer, weights in random_adapter(model.config, seed, dict(ranks)).layers.items():
        model.get_submodule(layer).weight.data += weights.scale * weights.up @ weights.down
    return model


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rank", [1, 5, 16, 33])
def test_tokens_equal_those_of_merged_weights(name: str, isa: str, rank: int) -> None:
    sequences = Sequences(tiny_model(name, torch.float32), torch.float32, isa=isa)
    ranks = dict.fromkeys(PROJECTIONS, rank)
    sequences.runner.add_adapter(random_adapter(CONFIGS[name], 1, ranks))
    prompt = random_tokens(40, 3)
    expected = transformers_greedy(merged_model(name, 1, tuple(ranks.items())), prompt, 12)
    assert greedy(sequences, prompt, 12, adapter=0) == expected
    assert greedy(sequences, prompt, 12) == transformers_greedy(tiny_model(name, torch.float32), prompt, 12) != expected


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["llama-tied-biased", "qwen3"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    isa=st.sampled_from(available_isas()),
    num_threads=st.sampled_from([1, 2, 3]),
    bits=st.sampled_from([None, *BITS]),
    adapters=st.lists(st.dictionaries(st.sampled_from(PROJECTIONS), st.integers(1, 70), min_size=1), max_size=3),
    data=st.data(),
)
def test_a_sequence_has_the_same_bits_in_any_company(
    name: str,
    dtype: torch.dtype,
    isa: str,
    num_threads: int,
    bits: QuantizedBits | None,
    adapters: list[dict[str, int]],
    data: st.DataObject,
) -> None:
    """Sequences with several adapters and without, together, against each alone beside no other adapter."""
    model = tiny_model(name, dtype)
    together = Sequences(model, dtype, isa=isa, num_threads=num_threads, bits=bits)
    for seed, ranks in enumerate(adapters):
        together.runner.add_adapter(random_adapter(model.config, seed, ranks))
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 30, 100]), min_size=1, max_size=8))
    chosen = [data.draw(st.integers(-1, len(adapters) - 1)) for _ in lengths]
    parts, expected, free = [], [], 0
    for i, (length, adapter) in enumerate(zip(lengths, chosen, strict=True)):
        alone = Sequences(model, dtype, isa=isa, num_threads=1, bits=bits)
        if adapter >= 0:
            alone.runner.add_adapter(random_adapter(model.config, adapter, adapters[adapter]))
        tokens = random_tokens(length, i)
        expected.append(alone.step([(tokens, 0, blocks_for(length, 16))], [min(adapter, 0)]))
        parts.append((tokens, 0, blocks_for(length, 16, free)))
        free += len(parts[-1][2])
    assert torch.equal(together.step(parts, chosen), torch.cat(expected))


def test_bfloat16_adapters_err_less_than_merged_bfloat16_weights() -> None:
    """Against everything in float32: adapters' products are not rounded before they are added."""
    config, ranks = CONFIGS["llama"], dict.fromkeys(PROJECTIONS, 8)
    model = tiny_model("llama", torch.bfloat16)
    exact = type(model)(config)
    exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    adapter = random_adapter(config, 1, ranks)
    for layer, weights in adapter.layers.items():
        down, up = weights.down.bfloat16().float(), weights.up.bfloat16().float()
        exact.get_submodule(layer).weight.data += weights.scale * up @ down
    rounded = type(model)(config).bfloat16()
    rounded.load_state_dict(exact.state_dict())
    tokens = random_tokens(90, 6)
    sequences = Sequences(model, torch.bfloat16)
    sequences.runner.add_adapter(adapter)
    logits = sequences.step([(tokens, 0, blocks_for(90, 16))], [0])
    with torch.no_grad():
        expected, theirs = exact(torch.tensor([tokens])).logits[0], rounded(torch.tensor([tokens])).logits[0].float()
    assert (logits - expected).square().mean() < (theirs - expected).square().mean()


def test_only_the_rows_asked_for_are_adapted_in_the_last_layer() -> None:
    sequences = Sequences(tiny_model("llama", torch.float32), torch.float32)
    sequences.runner.add_adapter(random_adapter(CONFIGS["llama"], 1, dict.fromkeys(PROJECTIONS, 3)))
    tokens, tables = random_tokens(20, 1), [blocks_for(20, 16), blocks_for(20, 16, 2)]
    everything = sequences.step([(tokens, 0, table) for table in tables], [-1, 0])
    batch = sequences.pool.batch(tables, np.array([20, 20]), np.array([20, 20]), num_query_heads=6)
    rows, adapters = np.array([39, 3, 21], dtype=np.int32), np.array([-1, 0], dtype=np.int32)
    some = sequences.runner.forward(np.array(tokens * 2, dtype=np.int32), batch, rows, adapters)
    assert torch.equal(some, everything[[39, 3, 21]])


@pytest.mark.parametrize(("adapters", "message"), [([1], "adapter 1"), ([0, 0], "2 adapters for a batch of 1")])
def test_a_step_with_adapters_that_are_not_there_is_refused(adapters: list[int], message: str) -> None:
    sequences = Sequences(tiny_model("llama", torch.float32), torch.float32)
    sequences.runner.add_adapter(random_adapter(CONFIGS["llama"], 1, {"q_proj": 2}))
    with pytest.raises(ValueError, match=message):
        sequences.step([([5], 0, blocks_for(1, 16))], adapters)


def test_matrices_of_other_shapes_are_refused() -> None:
    sequences = Sequences(tiny_model("llama", torch.float32), torch.float32)
    layer = "model.layers.1.mlp.up_proj"
    for down, up, message in [
        ((2, 71), (100, 2), rf"{layer}.lora_A.weight has shape \(2, 71\); the model served takes \(2, 72\)"),
        ((2, 72), (99, 2), rf"{layer}.lora_B.weight has shape \(99, 2\); the model served takes \(100, 2\)"),
    ]:
        adapter = Adapter("odd", "another/model", {layer: LoraWeights(torch.ones(down), torch.ones(up), 1.0)})
        with pytest.raises(UnsupportedModelError, match=f"'odd' was made for another/model: {message}"):
            sequences.runner.add_adapter(adapter)
