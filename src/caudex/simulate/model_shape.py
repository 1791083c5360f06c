"""A model as the roofline sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from caudex.sizing.kv_size import kv_size
from caudex.sizing.models import load_config

_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder in 16 bits: what a step computes and reads."""

    name: str
    layers: int
    heads: int
    head_dim: int
    kv_bytes_per_token: int
    active_parameters: float
    total_parameters: float

    @property
    def weight_bytes(self) -> float:
        return self.total_parameters * _BYTES_PER_ELEMENT

    @property
    def flops_per_token(self) -> float:
        """Of the matrix products with weights: a multiplication and an addition a parameter."""
        return 2.0 * self.active_parameters

    @property
    def attention_flops_per_pair(self) -> float:
        """For one query token and one key token: scores and weighted sum, over all heads and layers."""
        return 4.0 * self.layers * self.heads * self.head_dim


def find_model(name: str) -> ModelShape:
    """A known model, or one from a directory with a config.json (or that file).

    Raises:
        ValueError: there is no such model, or its config does not say how large it is; the message names what is known.
    """
    known_name, config = load_config(name)
    kv = kv_size(name)
    if kv.parameters is None:
        raise ValueError(f"the config of {name} does not say how many parameters it has; name a known model")
    heads = int(config["num_attention_heads"])
    return ModelShape(
        known_name,
        int(config["num_hidden_layers"]),
        heads,
        _head_dim(config, heads),
        int(kv.bytes_per_cached_token),
        kv.parameters,
        float(config.get("total_parameters", kv.parameters)),
    )


def _head_dim(config: dict[str, Any], heads: int) -> int:
    return int(config.get("head_dim") or int(config["hidden_size"]) // heads)
