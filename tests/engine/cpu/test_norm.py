"""Compiled RMSNorms: what transformers' own compute, rows apart, and only where that is what a module computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, GemmaModel, LlamaConfig, LlamaModel, Olmo2Config, Olmo2Model
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from caudex.engine.cpu import ThreadPool, available_isas, compile_norms
from caudex.engine.cpu.norm import CompiledRmsNorm

THREADS = ThreadPool(2)
TINY: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 40,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": None,
}


def random_norm(kind: Callable[..., nn.Module], features: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(features)
    module = kind(features, eps=1e-5)
    module.weight.data = torch.randn(features)
    return module.to(dtype)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("features", [1, 15, 16, 72, 576])
def test_rows_are_those_of_transformers_and_independent(
    features: int, kind: Callable[..., nn.Module], dtype: torch.dtype, isa: str
) -> None:
    holder = nn.Sequential(random_norm(kind, features, dtype))
    x = torch.randn(3, 17, features).to(dtype)
    exact = random_norm(kind, features, dtype).float()(x.float())
    assert compile_norms(holder, THREADS, isa) == 1
    computed = holder(x)
    assert computed.dtype == dtype
    torch.testing.assert_close(
        computed.float(), exact.to(dtype).float(), rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-5
    )
    rows = torch.cat([holder(x[i, j : j + 1]) for i in range(3) for j in range(17)])
    assert torch.equal(rows, computed.view(-1, features))
    assert torch.equal(holder(x.transpose(0, 1)), computed.transpose(0, 1)), "other strides"


@pytest.mark.parametrize(
    ("architecture", "config", "count"),
    [
        (LlamaModel, LlamaConfig(**TINY), 5),
        (GemmaModel, GemmaConfig(**TINY, head_dim=20), 5),
        (Olmo2Model, Olmo2Config(**TINY), 9),
    ],
    ids=["llama", "gemma", "olmo2"],
)
def test_every_norm_of_a_model_is_replaced(architecture: Callable[[Any], nn.Module], config: Any, count: int) -> None:
    model = architecture(config)
    assert compile_norms(model, THREADS) == count
    assert sum(isinstance(module, CompiledRmsNorm) for module in model.modules()) == count


class CentredRMSNorm(LlamaRMSNorm):
    """Named as an RMSNorm, but it takes the mean away first."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class GatedRMSNorm(LlamaRMSNorm):
    """Takes a gate too, which the compiled one does not."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normed = super().forward(hidden_states)
        return normed if gate is None else normed * gate


@pytest.mark.parametrize("kind", [CentredRMSNorm, GatedRMSNorm, nn.LayerNorm])
def test_a_module_that_computes_anything_else_stays(kind: Callable[..., nn.Module]) -> None:
    holder = nn.Sequential(random_norm(kind, 24, torch.float32))
    assert compile_norms(holder, THREADS) == 0
    assert type(holder[0]) is kind


def test_rows_of_another_width_are_refused() -> None:
    norm = CompiledRmsNorm(torch.ones(8), 1e-6, THREADS, "auto")
    with pytest.raises(ValueError, match="input has 9 features; expected 8"):
        norm(torch.ones(2, 9))
