"""Linear layers over packed weights, put in the place of a model's own."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, TypeAlias

import torch
from torch import nn

from caudex import _core
from caudex.engine.cpu.kv_pool import DTYPE_NAMES
from caudex.engine.cpu.threads import ThreadPool

QuantizedBits: TypeAlias = Literal[4, 8]


class PackedLinear(nn.Module):
    """x @ W.T + b for inference, over a packed copy of W in float32 or bfloat16.

    Where the processor decodes them quicker than it reads them, bfloat16 weights are kept in 12 bits, without loss.
    An output's bits depend on its own row of x alone, not on the number of rows or their order: every sum takes its
    inputs in ascending order. (torch's own products change with the number of rows.)

    Args:
        weight: [outputs, inputs], any strides.
        bias: [outputs] or None.
        product: what multiplies; its threads are the layer's.
        arena: where the packed weights go; those of one model belong side by side.
        bits: of a quantized weight, 8 or 4, with loss; None keeps them as they are. Inputs are rounded to 8 bits then:
            each 64 of a row have a scale of their own, so that an output's bits still depend on its row alone.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: _core.PackedProduct,
        arena: _core.Arena,
        *,
        bits: QuantizedBits | None = None,
    ) -> None:
        super().__init__()
        if weight.dtype not in DTYPE_NAMES:
            raise ValueError(f"weight is {weight.dtype}; expected torch.float32 or torch.bfloat16")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.product = product
        self.matrix = _core.PackedMatrix(
            product,
            arena,
            DTYPE_NAMES[weight.dtype],
            self.out_features,
            self.in_features,
            weight.data_ptr(),
            weight.stride(0),
            weight.stride(1),
            bits or 0,
        )
        self.packed_bias: torch.Tensor | None = None
        if bias is not None:
            self.packed_bias = torch.zeros(-(-self.out_features // 32) * 32)
            self.packed_bias[: self.out_features] = bias.detach()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        if x.dtype != self.dtype or x.shape[-1] != self.in_features:
            raise ValueError(
                f"input is {x.dtype} with {x.shape[-1]} features; expected {self.dtype} with {self.in_features}"
            )
        rows = x.reshape(-1, self.in_features).contiguous()
        output = torch.empty(*x.shape[:-1], self.out_features, dtype=self.dtype)
        bias = 0 if self.packed_bias is None else self.packed_bias.data_ptr()
        self.product.run(self.matrix, bias, rows.data_ptr(), self.in_features, rows.shape[0], output.data_ptr())
        return output


def pack_linear_layers(
    model: nn.Module,
    threads: ThreadPool,
    isa: str = "auto",
    *,
    bits: QuantizedBits | None = None,
    exact: Container[nn.Module] = (),
) -> int:
    """Replace every `nn.Linear` and GPT-2 style `Conv1D` below `model` by a `PackedLinear`; returns how many.

    The model must be on the CPU and is for inference only afterwards. A weight that is tied to the embedding stays
    in place there; the others are freed. With `bits` all but the modules in `exact` are quantized.
    """
    product, arena = _core.PackedProduct(threads.native, isa), _core.Arena()
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = weight_by_output(child)
            if weight is not None:
                bias = getattr(child, "bias", None)
                packed = PackedLinear(weight, bias, product, arena, bits=None if child in exact else bits)
                setattr(parent, name, packed)
                replaced += 1
    return replaced


def weight_by_output(module: nn.Module) -> torch.Tensor | None:
    """A linear module's weight as [outputs, inputs], or None for any other module."""
    if isinstance(module, nn.Linear):
        return module.weight.detach()
    if type(module).__name__ == "Conv1D":
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return weight.detach().t()
    return None
