"""RMSNorm layers over the compiled kernel, put in the place of a model's own (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from caudex import _core
from caudex.engine.cpu.kv_pool import DTYPE_NAMES
from caudex.engine.cpu.threads import ThreadPool

PROBE_ROWS = 4
PROBE_TOLERANCE = 1e-5


class CompiledRmsNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in float32 and rounded once.

    A row's bits depend on that row alone.

    Args:
        weight: [features] float32.
        threads: what computes.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, threads: ThreadPool, isa: str) -> None:
        super().__init__()
        self.features = weight.shape[0]
        self.epsilon = epsilon
        self.norm = _core.RmsNorm(threads.native, isa, weight.contiguous().data_ptr(), self.features, epsilon)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.epsilon}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., features] to the same, in float32 or bfloat16."""
        if x.shape[-1] != self.features:
            raise ValueError(f"input has {x.shape[-1]} features; expected {self.features}")
        x = x.contiguous()
        output = torch.empty_like(x)
        self.norm.run(DTYPE_NAMES[x.dtype], x.data_ptr(), x.numel() // self.features, output.data_ptr())
        return output


def compile_norms(model: nn.Module, threads: ThreadPool, isa: str = "auto") -> int:
    """Replace every module below `model` that computes an RMSNorm; returns how many.

    A module is one if it says so in its class name and computes the same on random rows in float32, with its weight or,
    as Gemma's, with one more than its weight. What computes anything else stays.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            compiled = _compiled(child, threads, isa) if type(child).__name__.endswith("RMSNorm") else None
            if compiled is not None:
                setattr(parent, name, compiled)
                replaced += 1
    return replaced


def _compiled(module: nn.Module, threads: ThreadPool, isa: str) -> CompiledRmsNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    takes_rows_alone = len(inspect.signature(module.forward).parameters) == 1
    if (
        not isinstance(weight, torch.Tensor)
        or weight.dim() != 1
        or not isinstance(epsilon, float)
        or not takes_rows_alone
    ):
        return None
    for candidate in (weight.detach().float(), 1.0 + weight.detach().float()):
        compiled = CompiledRmsNorm(candidate, epsilon, threads, isa)
        if _agree(module, compiled, epsilon):
            return compiled
    return None


@torch.no_grad()
def _agree(module: nn.Module, compiled: CompiledRmsNorm, epsilon: float) -> bool:
    """Whether both compute the same of rows so small that epsilon takes part, and of larger ones."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(PROBE_ROWS, compiled.features, generator=generator)
    rows *= torch.tensor([epsilon**0.5, 0.1, 1.0, 30.0])[:, None]
    return torch.allclose(module(rows).float(), compiled(rows), rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE)
