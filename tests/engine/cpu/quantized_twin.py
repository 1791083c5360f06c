"""What products in 8 bits come to, in plain numpy: integers that are exact, and float32 in one order."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 64
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


def product(x: Floats, weight: Floats) -> Floats:
    """x [rows, depth] times weight [columns, depth] transposed: a group of inputs after the other."""
    padding = ((0, 0), (0, -x.shape[1] % GROUP))
    weights, weight_scales = quantized(np.pad(weight, padding))
    rows, row_scales = quantized(np.pad(x, padding).reshape(len(x), -1, GROUP))
    total = np.zeros((len(x), len(weight)), dtype=np.float32)
    for group in range(rows.shape[1]):
        columns = weights[:, group * GROUP : (group + 1) * GROUP]
        total += (rows[:, group] @ columns.T).astype(np.float32) * row_scales[:, group]
    return total * weight_scales.T
