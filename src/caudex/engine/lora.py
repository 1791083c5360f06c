"""LoRA adapters inside transformers' modules, several at once over one base model, chosen per request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import torch
from torch import Tensor, nn

from caudex.engine.adapter import Adapter, LoraWeights
from caudex.engine.batch import StepBatch
from caudex.engine.cpu import weight_by_output

AdapterRows: TypeAlias = Mapping[str, Tensor]
"""For each adapter that a step uses, the rows of the batch that belong to its sequences."""

_current_rows: ContextVar[AdapterRows] = ContextVar("caudex_adapter_rows")


class LoraLinear(nn.Module):
    """A linear layer to whose rows each adapter adds its own part, for the rows of the requests that chose it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.ModuleDict()
        self.up = nn.ModuleDict()

    def add(self, slot: str, weights: LoraWeights, dtype: torch.dtype) -> None:
        """Add an adapter's matrices; the scale goes into `up`."""
        self.down[slot] = _linear(weights.down.to(dtype))
        self.up[slot] = _linear((weights.up.float() * weights.scale).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (1, T, inputs) to (1, T, outputs)."""
        output: Tensor = self.base(x)
        for slot, rows in _current_rows.get({}).items():
            if slot in self.down:
                output[0, rows] += self.up[slot](self.down[slot](x[0, rows]))
        return output


class LoraAdapters:
    """The adapters of one model, by name."""

    def __init__(self, names: Sequence[str]) -> None:
        # A module's children cannot have any name (no dots, say), so adapters are numbered inside the model.
        self._slots = {name: f"adapter{index}" for index, name in enumerate(names)}

    @classmethod
    def load(cls, model: nn.Module, adapters: Sequence[Adapter]) -> LoraAdapters:
        """Put `adapters` into `model`'s linear layers.

        Raises:
            UnsupportedModelError: an adapter was made for another model.
        """
        loaded = cls([adapter.name for adapter in adapters])
        for adapter in adapters:
            adapter.check(lambda layer: _linear_shape(model, layer))
            for layer, weights in adapter.layers.items():
                _wrap(model, layer).add(loaded._slots[adapter.name], weights, getattr(model, "dtype", torch.float32))
        return loaded

    @contextmanager
    def adapting(self, batch: StepBatch) -> Iterator[None]:
        """Within this context, the model's layers treat the rows of `batch` as its sequences' adapters ask."""
        token = _current_rows.set(self._rows(batch))
        try:
            yield
        finally:
            _current_rows.reset(token)

    def _rows(self, batch: StepBatch) -> AdapterRows:
        spans: dict[str, list[Tensor]] = {}
        bounds = zip(batch.query_starts[:-1].tolist(), batch.query_starts[1:].tolist(), batch.adapters, strict=True)
        for start, end, name in bounds:
            if name is not None:
                spans.setdefault(self._slots[name], []).append(torch.arange(start, end))
        return {slot: torch.cat(rows) for slot, rows in spans.items()}


def adapter_matrices(model: nn.Module) -> list[nn.Module]:
    """The adapters' own linear layers inside `model`."""
    adapted = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    return [matrix for layer in adapted for matrix in (*layer.down.values(), *layer.up.values())]


def _linear_shape(model: nn.Module, name: str) -> tuple[int, int] | None:
    """(outputs, inputs) of the linear layer `name`, or None if there is none."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    weight = weight_by_output(layer.base if isinstance(layer, LoraLinear) else layer)
    return None if weight is None else (weight.shape[0], weight.shape[1])


def _wrap(model: nn.Module, name: str) -> LoraLinear:
    """The linear layer `name` of `model`, made ready to take adapters."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    layer = parent.get_submodule(child)
    if not isinstance(layer, LoraLinear):
        layer = LoraLinear(layer)
        setattr(parent, child, layer)
    return layer


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
