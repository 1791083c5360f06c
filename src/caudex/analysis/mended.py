"""The log as it would be with its breakers mended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caudex.analysis.curves import CapacityRow, capacity_rows, plotted
from caudex.analysis.replay import block_trace
from caudex.analysis.tables import Table
from caudex.cache.hit_curve import hit_curve
from caudex.sizing.kv_size import KvSize
from caudex.trace.encode import PromptEncoder
from caudex.trace.request import Request


@dataclass(frozen=True, slots=True)
class Mended:
    """The log with all its breakers mended: what an infinite cache would serve, and what that takes."""

    hit_rate: float
    prompt_tokens: int
    capacities: Table[CapacityRow]
    lru_knots: tuple[tuple[int, float], ...]

    def hit_rate_at(self, capacity: int) -> float:
        blocks, rates = zip(*self.lru_knots, strict=True)
        return float(np.interp(capacity, blocks, rates))


def measure_mended(requests: list[Request], encoder: PromptEncoder, block_size: int, kv: KvSize | None) -> Mended:
    trace = block_trace(requests, encoder, block_size)
    curve = hit_curve(trace)
    return Mended(curve.ceiling, trace.prompt_tokens, capacity_rows(curve, kv), plotted(curve))
