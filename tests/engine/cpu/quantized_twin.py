"""What products in 8 bits, with weights in 8 or 4, come to in plain numpy: exact integers, and float32 in one order."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 64
SCALED: Final = 32
LEAST: Final = np.float32(1e-30)
MOST_BYTE: Final = np.float32(127)

Floats = NDArray[np.float32]


def quantized(values: Floats) -> tuple[NDArray[Any], Floats]:
    """Whole numbers from -127 to 127, and what each stands for, by the largest magnitude in the last dimension."""
    most = np.abs(values).max(-1, keepdims=True)
    zeros = most < LEAST
    divisor = np.where(zeros, np.float32(1), most)
    inverse = np.where(zeros, np.float32(0), MOST_BYTE / divisor)
    scale = np.where(zeros, np.float32(0), most / MOST_BYTE)
    return np.rint(values * inverse).astype(np.int64), scale


def product(x: Floats, weight: Floats, bits: int = 8) -> Floats:
    """x [rows, depth] times weight [columns, depth] transposed: a group of inputs after the other."""
    padding = ((0, 0), (0, -x.shape[1] % GROUP))
    weights, weight_scales = (quantized if bits == 8 else quantized_to_four_bits)(np.pad(weight, padding))
    rows, row_scales = quantized(np.pad(x, padding).reshape(len(x), -1, GROUP))
    total = np.zeros((len(x), len(weight)), dtype=np.float32)
    for group in range(rows.shape[1]):
        columns = weights[:, group * GROUP : (group + 1) * GROUP]
        total += (rows[:, group] @ columns.T).astype(np.float32) * row_scales[:, group]
    return total * weight_scales.T


def quantized_to_four_bits(weight: Floats) -> tuple[NDArray[Any], Floats]:
    """The 8-bit weights that 4-bit codes stand for, -127 to 127, and what each of those stands for."""
    most = np.abs(weight).max(-1, keepdims=True)
    zeros = most < LEAST
    inverse = np.where(zeros, np.float32(0), MOST_BYTE / np.where(zeros, np.float32(1), most))
    targets = np.rint(weight * inverse * np.float32(16)).astype(np.int64)
    near = nearest_of_four_bits(targets.reshape(-1, SCALED))
    return near.reshape(weight.shape), np.where(zeros, np.float32(0), most / MOST_BYTE)


def nearest_of_four_bits(targets: NDArray[Any]) -> NDArray[Any]:
    """Of the weights `floor(code * scale / 16) + zero` that are tried for a row of `targets`, those that are nearest.

    Targets are in sixteenths. Nothing more is tried for a row once its weights are off by half on average.
    """
    low = targets.min(1, keepdims=True)
    span = targets.max(1, keepdims=True) - low
    best, least = np.zeros_like(targets), np.full_like(low, 1 << 40)
    for steps in (15, 14, 13, 12, 16, 17, 18, 19):
        for more in (1, 0, -1):
            is_good = least <= SCALED * 64
            scale = np.clip((span + steps // 2) // steps + more, 0, 255)
            zero = (2 * low + np.maximum(0, span - 15 * scale) + 31) // 32
            for _ in range(2):
                zero = np.maximum(-127, np.minimum(127 - 15 * scale // 16, zero))
                weights = zero + nearest_codes(targets - 16 * zero, scale) * scale // 16
                differences = targets - 16 * weights
                error = (differences**2).sum(1, keepdims=True)
                is_better = ~is_good & (error < least)
                best, least = np.where(is_better, weights, best), np.where(is_better, error, least)
                zero = zero + (differences.sum(1, keepdims=True) + 256) // 512
    return best


def nearest_codes(above_zero: NDArray[Any], scale: NDArray[Any]) -> NDArray[Any]:
    inverse = np.where(scale > 0, np.float32(1) / np.maximum(scale, 1).astype(np.float32), np.float32(0))
    codes = np.maximum(np.float32(0), (above_zero + 8).astype(np.float32) * inverse)
    return np.minimum(np.float32(15), codes + np.float32(0.5)).astype(np.int64)
