"""LoRA adapters as peft saves them: read, and held against the model that they are to change (Hu et al., 2021)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from caudex.engine.loading import UnsupportedModelError

_CONFIG, _WEIGHTS, _PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_NEEDS_MORE_THAN_TWO_MATRICES = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """What an adapter adds to one linear layer: scale * up @ (down @ x). Shapes (rank, inputs), (outputs, rank)."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's matrices by the name of the linear layer that they change, such as model.layers.0.mlp.up_proj.

    `base` is the model that it was trained on, as its configuration names it.
    """

    name: str
    base: str | None
    layers: Mapping[str, LoraWeights]

    def check(self, shape_of: Callable[[str], tuple[int, int] | None]) -> None:
        """See that every layer is there and takes these matrices.

        Args:
            shape_of: (outputs, inputs) of a model's linear layer, or None where there is none of that name.

        Raises:
            UnsupportedModelError: the adapter was made for another model.
        """
        made_for = f"made for {self.base or 'another model'}"
        for layer, weights in self.layers.items():
            shape = shape_of(layer)
            if shape is None:
                raise UnsupportedModelError(f"{self} was {made_for}: the model served has no linear layer {layer}")
            rank = weights.down.shape[0]
            pairs = ((_DOWN, weights.down, (rank, shape[1])), (_UP, weights.up, (shape[0], rank)))
            for suffix, matrix, expected in pairs:
                if tuple(matrix.shape) != expected:
                    raise UnsupportedModelError(
                        f"{self} was {made_for}: {layer}{suffix} has shape {tuple(matrix.shape)}; "
                        f"the model served takes {expected}"
                    )

    def __str__(self) -> str:
        return f"the adapter {self.name!r}"


def read_adapter(name: str, folder: Path) -> Adapter:
    """The adapter that is saved in `folder`.

    Raises:
        FileNotFoundError: the folder holds no adapter.
        UnsupportedModelError: it is no plain LoRA, or its files are damaged.
    """
    config = _read_config(name, folder)
    return Adapter(name, config.get("base_model_name_or_path"), _pairs(name, config, _read_tensors(name, folder)))


def _read_config(name: str, folder: Path) -> Mapping[str, Any]:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} to load the adapter {name!r} from")
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {_CONFIG}: it is not a LoRA adapter in peft's format")
    try:
        config: dict[str, Any] = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UnsupportedModelError(f"{path} is no JSON object: {error}") from error
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(f"the adapter {name!r} is of type {kind}; only LORA can be served")
    for feature in _NEEDS_MORE_THAN_TWO_MATRICES:
        if config.get(feature):
            raise UnsupportedModelError(f"the adapter {name!r} uses {feature}, which cannot be served")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise UnsupportedModelError(f"{path} has lora_alpha {config.get('lora_alpha')!r}; expected a number")
    return config


def _read_tensors(name: str, folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / _WEIGHTS
    if not path.is_file():
        remedy = " (pickled weights are not loaded: save them with peft again)" if (folder / _PICKLED).is_file() else ""
        raise FileNotFoundError(f"{folder} has no {_WEIGHTS}{remedy}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UnsupportedModelError(f"the weights of the adapter {name!r} are damaged ({path}: {error})") from error


def _pairs(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, LoraWeights]:
    layers = sorted(key.removesuffix(_DOWN) for key in tensors if key.endswith(_DOWN))
    for layer in layers:
        if "." not in layer.removeprefix(_PREFIX):
            raise UnsupportedModelError(f"the adapter {name!r} changes the output layer, which cannot be served")
    unknown = sorted(tensors.keys() - {layer + suffix for layer in layers for suffix in (_DOWN, _UP)})
    if unknown or not layers:
        found = unknown[0] if unknown else "none at all"
        raise UnsupportedModelError(f"the adapter {name!r} holds more or less than pairs of lora_A and lora_B: {found}")
    pairs = {layer.removeprefix(_PREFIX): _pair(name, layer, tensors) for layer in layers}
    return {layer: LoraWeights(*pair, _scale(config, layer, pair[0].shape[0])) for layer, pair in pairs.items()}


def _pair(name: str, layer: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    down, up = tensors[layer + _DOWN], tensors.get(layer + _UP)
    if up is None or down.dim() != 2 or up.dim() != 2 or up.shape[1] != down.shape[0] or not down.numel():
        shapes = f"{tuple(down.shape)} and {None if up is None else tuple(up.shape)}"
        raise UnsupportedModelError(
            f"the adapter {name!r} is damaged: {layer}{_DOWN} and {_UP.lstrip('.')} have shapes {shapes}; "
            "expected (rank, inputs) and (outputs, rank)"
        )
    if not (down.is_floating_point() and up.is_floating_point()):
        raise UnsupportedModelError(f"the adapter {name!r} has {layer} in {down.dtype} and {up.dtype}; expected floats")
    return down, up


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """`alpha_pattern` gives layers an alpha of their own, by regular expressions of how their names end."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    try:
        matching = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", layer))
        alpha = next(matching, config["lora_alpha"])
    except re.error as error:
        raise UnsupportedModelError(f"alpha_pattern {list(patterns)} is no list of expressions: {error}") from error
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
