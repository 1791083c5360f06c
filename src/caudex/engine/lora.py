"""LoRA adapters in peft's format, several at once over one base model, chosen per request (Hu et al., 2021)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from caudex.engine.batch import StepBatch
from caudex.engine.loading import UnsupportedModelError

AdapterRows: TypeAlias = Mapping[str, Tensor]
"""For each adapter that a step uses, the rows of the batch that belong to its sequences."""

_PREFIX = "base_model.model."
_NEEDS_MORE_THAN_TWO_MATRICES = ("use_dora", "lora_bias", "modules_to_save", "target_parameters", "layer_replication")
_current_rows: ContextVar[AdapterRows] = ContextVar("caudex_adapter_rows")


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What an adapter adds to one linear layer: scale * up @ (down @ x). Shapes (rank, inputs), (outputs, rank)."""

    down: Tensor
    up: Tensor
    scale: float


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
    def load(cls, model: nn.Module, folders: Mapping[str, Path]) -> LoraAdapters:
        """Put the adapters of `folders` into `model`'s linear layers.

        Raises:
            UnsupportedModelError: an adapter is no plain LoRA, or was made for another model; says which and why.
        """
        adapters = cls(list(folders))
        for name, folder in folders.items():
            for target, weights in read_adapter(name, folder).items():
                layer = _wrap(model, name, target)
                dtype: torch.dtype = getattr(model, "dtype", torch.float32)
                layer.add(adapters._slots[name], weights, dtype)
        return adapters

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


def read_adapter(name: str, folder: Path) -> dict[str, LoraWeights]:
    """An adapter's matrices by the name of the layer they belong to.

    Raises:
        UnsupportedModelError: it is no plain LoRA.
        FileNotFoundError: the folder holds no adapter.
    """
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"adapter {name} is of type {config.get('peft_type')}; only LORA can be served")
    for feature in _NEEDS_MORE_THAN_TWO_MATRICES:
        if config.get(feature):
            raise UnsupportedModelError(f"adapter {name} uses {feature}, which cannot be served")
    tensors = load_file(folder / "adapter_model.safetensors")
    targets = sorted(key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight"))
    if len(tensors) != 2 * len(targets):
        raise UnsupportedModelError(f"adapter {name} holds more than pairs of lora_A and lora_B matrices")
    weights = {}
    for target in targets:
        down, up = tensors[f"{target}.lora_A.weight"], tensors[f"{target}.lora_B.weight"]
        weights[target.removeprefix(_PREFIX)] = LoraWeights(down, up, _scale(config, target, down.shape[0]))
    return weights


def _scale(config: Mapping[str, Any], target: str, rank: int) -> float:
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if target.endswith(key)), config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _wrap(model: nn.Module, adapter: str, target: str) -> LoraLinear:
    """The layer `target` of `model`, made ready to take adapters."""
    parent_name, _, child = target.rpartition(".")
    try:
        parent = model.get_submodule(parent_name)
        layer = parent.get_submodule(child)
    except AttributeError:
        raise UnsupportedModelError(f"adapter {adapter} is for another model: this one has no layer {target}") from None
    if not parent_name or layer is getattr(model, "lm_head", None):
        raise UnsupportedModelError(f"adapter {adapter} changes the output layer {target}, which cannot be served")
    if not isinstance(layer, LoraLinear):
        layer = LoraLinear(layer)
        setattr(parent, child, layer)
    return layer


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
