"""How attention is plugged into transformers' models, and what an attention backend must do.

transformers lets a model's attention be replaced by a function of its registry. Ours finds what it needs to know about
the step (where each sequence's KV lies) in a context variable: some models drop the keyword arguments they are called
with, so nothing can travel beside the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from caudex.engine.batch import Int32Array, StepBatch
from caudex.engine.kv_memory import KvMemory

ATTENTION_NAME = "caudex_paged"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention besides queries, keys and values.

    `softcap` squashes scores to (-softcap, softcap) by tanh; `sinks`, shape (heads,), are scores that join the softmax
    but carry no value.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class LayerAttention(Protocol):
    """The object in the context variable: computes one layer's attention for the step that is running."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of this step's tokens over their whole sequences.

        Args:
            layer: index of the layer, from 0.
            query: shape (heads, T, key size); rows as in StepBatch.
            key: shape (KV heads, T, key size).
            value: shape (KV heads, T, value size).

        Returns:
            Shape (T, heads, value size).
        """


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one layer's KV, as the model's own forward pass produced them."""

    num_kv_heads: int
    key_size: int
    value_size: int
    num_heads: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_size + self.value_size) * dtype.itemsize

    @property
    def quantized_bytes_per_token(self) -> int:
        """In 8 bits, with a float32 scale for each head's key and another for its value."""
        return self.num_kv_heads * (self.key_size + self.value_size + 2 * torch.float32.itemsize)


class AttentionBackend(ABC):
    """Owns the KV pool of every layer and attends to it through block tables.

    `is_bit_stable` says whether a row has the same bits whatever shares its batch.
    """

    is_bit_stable: ClassVar[bool] = False

    @property
    @abstractmethod
    def kv_memory(self) -> KvMemory:
        """The pool's blocks as bytes."""

    @abstractmethod
    def copy_blocks(self, copies: Int32Array) -> None:
        """Copy KV inside the pool, row by row in order: shape (n, 3), (source block, target block, slots to copy)."""

    @abstractmethod
    def begin_step(self, batch: StepBatch) -> LayerAttention:
        """Prepare what all layers of a step share."""


_current: ContextVar[LayerAttention] = ContextVar("caudex_layer_attention")


@contextmanager
def attending(attention: LayerAttention) -> Iterator[None]:
    """Within this context, models loaded with `ATTENTION_NAME` attend through `attention`."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; models get no mask for it, as none is registered."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls: query is (1, heads, T, size), the result (1, T, heads, size)."""
    attention = _current.get()
    if isinstance(attention, LayerProbe):
        attention.note(module, attention_mask, position_bias, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scale, softcap, s_aux)
    return attention.attend(module.layer_idx, query[0], key[0], value[0], options)[None], None


def attend_densely(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention of the last n tokens of one sequence over all of it, as transformers' eager code computes it.

    Args:
        query: shape (heads, n, key size); keys and values have shape (KV heads, length, size), length at least n.

    Returns:
        Shape (n, heads, value size).
    """
    num_heads, num_new, _ = query.shape
    num_kv_heads, length, value_size = value.shape
    grouped = query.reshape(num_kv_heads, num_heads // num_kv_heads, num_new, -1)
    scores = torch.matmul(grouped, key[:, None].transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    future = torch.ones(num_new, length, dtype=torch.bool, device=query.device).triu(length - num_new + 1)
    scores = scores.masked_fill(future, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.reshape(num_kv_heads, -1, 1, 1).expand(-1, -1, num_new, 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)[..., :length]
    output = torch.matmul(weights, value[:, None])
    return output.reshape(num_heads, num_new, value_size).transpose(0, 1).contiguous()


@dataclass(slots=True)
class LayerProbe:
    """A LayerAttention for one short sequence without a pool, which records how the model calls its attention."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    options: dict[int, AttentionOptions] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    masked: bool = False
    biased: bool = False
    bidirectional: bool = False
    sliding_windows: set[int] = field(default_factory=set)

    def note(self, module: Any, mask: Tensor | None, bias: Tensor | None, sliding_window: int | None) -> None:
        """Record what a backend would have to ignore."""
        self.masked |= mask is not None
        self.biased |= bias is not None
        self.bidirectional |= not getattr(module, "is_causal", True)
        if sliding_window is not None:
            self.sliding_windows.add(sliding_window)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        if layer in self.shapes:
            self.repeated.append(layer)
        self.shapes[layer] = LayerShape(key.shape[0], key.shape[-1], value.shape[-1], query.shape[0])
        self.options[layer] = options
        return attend_densely(query, key, value, options)

    def layers(self) -> Sequence[LayerShape]:
        """Shapes in the order of the layers' indices."""
        return [self.shapes[index] for index in sorted(self.shapes)]
