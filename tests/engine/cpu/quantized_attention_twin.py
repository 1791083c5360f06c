"""Attention over keys and values in 8 bits, in plain numpy: integers that are exact, and float32 in one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from .attention_twin import Prompt
from .quantized_twin import LEAST, Floats, quantized

PARTITION, STEP, LANES = 256, 64, 16
LOG2E: Final = np.float32(1.44269504088896340736)
MOST_WEIGHT: Final = np.float32(255)
WEIGHT_TERMS: Final = (6.932829284e-1, 2.422109782e-1, 5.500893868e-2)
FACTOR_TERMS: Final = (
    6.931472029e-1,
    2.402264791e-1,
    5.550332471e-2,
    9.618437357e-3,
    1.339887458e-3,
    1.535336243e-4,
)


def hadamard(rows: Floats) -> Floats:
    """Sums and differences over groups of the largest power of two in the last dimension; not normalised."""
    count = rows.shape[-1]
    half = 1
    while half < count & -count:
        pairs = rows.reshape(*rows.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        rows = np.stack([low + high, low - high], axis=-2).reshape(rows.shape)
        half *= 2
    return rows


def exp2(x: Floats, terms: tuple[float, ...]) -> Floats:
    """2^x for x <= 0 by a polynomial on [-1/2, 1/2]; every product and every sum is rounded."""
    within = np.maximum(x, np.float32(-200))
    whole = np.rint(within)
    fraction = within - whole
    value = np.full_like(x, np.float32(terms[-1]))
    for term in reversed(terms[:-1]):
        value = value * fraction + np.float32(term)
    value = value * fraction + np.float32(1)
    return np.where(within < -126.5, np.float32(0), np.ldexp(value, whole.astype(np.int32)))


@dataclass
class State:
    """Of every row and head: the softmax so far."""

    maximum: Floats  # [rows, heads]
    sums: Floats  # [rows, heads, 16]
    output: Floats  # [rows, heads, head_dim]

    @classmethod
    def empty(cls, rows: int, heads: int, head_dim: int) -> State:
        maximum = np.full((rows, heads), -np.inf, dtype=np.float32)
        zeros = (np.zeros((rows, heads, n), dtype=np.float32) for n in (LANES, head_dim))
        return cls(maximum, *zeros)

    def add_step(self, scores: Floats, scale: Floats, values: NDArray[Any], value_scales: Floats) -> None:
        """scores [rows, heads, tokens], minus infinity where masked; values [tokens, heads, head_dim]."""
        sees = ~np.isneginf(scores).all(-1)
        maximum = np.maximum(self.maximum, scores.max(-1) * scale)
        factor = np.where(maximum > self.maximum, exp2(self.maximum - maximum, FACTOR_TERMS), np.float32(1))
        weights = exp2(scores * scale[..., None] - maximum[..., None], WEIGHT_TERMS)
        sums = self.sums * factor[..., None]
        for first in range(0, weights.shape[-1], LANES):
            part = weights[..., first : first + LANES]
            sums[..., : part.shape[-1]] += part
        scaled = weights * value_scales
        most = scaled.max(-1)
        zeros = most < LEAST
        unit = np.where(zeros, np.float32(0), most / MOST_WEIGHT)
        inverse = np.where(zeros, np.float32(0), MOST_WEIGHT / np.where(zeros, np.float32(1), most))
        levels = np.rint(scaled * inverse[..., None]).astype(np.int64)
        added = np.einsum("rht,thd->rhd", levels, values).astype(np.float32)
        output = self.output * factor[..., None] + added * unit[..., None]
        self.maximum = np.where(sees, maximum, self.maximum)
        self.sums = np.where(sees[..., None], sums, self.sums)
        self.output = np.where(sees[..., None], output, self.output)

    def fold(self, part: State) -> None:
        """Fold the state of the next partition into this one."""
        top = np.maximum(self.maximum, part.maximum)
        factor, part_factor = (exp2(state.maximum - top, FACTOR_TERMS)[..., None] for state in (self, part))
        sees = ~np.isneginf(part.maximum)[..., None]
        self.sums = np.where(sees, part.sums * part_factor + self.sums * factor, self.sums)
        self.output = np.where(sees, part.output * part_factor + self.output * factor, self.output)
        self.maximum = top

    def result(self) -> Floats:
        total = np.zeros_like(self.maximum)
        for lane in range(LANES):
            total = total + self.sums[..., lane]
        return self.output / total[..., None]


@np.errstate(invalid="ignore")  # of rows that see no token of a step, which keep their state
def reference(prompt: Prompt, scale: float) -> torch.Tensor:
    """The prompt's causal attention, to the bit; [rows, heads, head_dim] in the prompt's type."""
    query, key, value = (tensor.float().numpy() for tensor in (prompt.query, prompt.key, prompt.value))
    rows, heads, head_dim = query.shape
    group = heads // key.shape[1]
    queries, query_scales = quantized(hadamard(query))
    size = np.float32(head_dim & -head_dim)
    row_scale = np.maximum(query_scales[..., 0] * (np.float32(scale) * LOG2E / size), LEAST)
    keys, key_scales = (np.repeat(part, group, axis=1) for part in quantized(hadamard(key)))
    values, value_scales = (np.repeat(part, group, axis=1) for part in quantized(value))
    total = State.empty(rows, heads, head_dim)
    for start in range(0, rows, PARTITION):
        part = State.empty(rows, heads, head_dim)
        for first in range(start, min(start + PARTITION, rows), STEP):
            tokens = slice(first, min(first + STEP, start + PARTITION, rows))
            products = np.einsum("rhd,thd->rht", queries, keys[tokens]).astype(np.float32)
            scores = products * key_scales[tokens, :, 0].T
            unseen = np.arange(tokens.start, tokens.stop) > np.arange(rows)[:, None]
            scores[np.broadcast_to(unseen[:, None], scores.shape)] = -np.inf
            part.add_step(scores, row_scale, values[tokens], value_scales[tokens, :, 0].T)
        total.fold(part)
    return torch.from_numpy(total.result()).to(prompt.query.dtype)
