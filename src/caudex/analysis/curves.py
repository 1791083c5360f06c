"""Hit rate against capacity, policy, block size and tiers, from the real caches' replay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caudex.analysis.measure import Measured
from caudex.analysis.policies import CLAIRVOYANT, LRU, policy_hit_rates
from caudex.analysis.tables import Table
from caudex.cache.clairvoyant import clairvoyant
from caudex.cache.hit_curve import HitCurve
from caudex.sizing.kv_size import KvSize

SHARES_OF_CEILING = (0.90, 0.95, 0.99)
BLOCK_SIZES = (1, 16, 32, 64, 128, 512)
DEFAULT_POINTS = 10
CURVE_POINTS = 300


@dataclass(frozen=True, slots=True)
class CurveRow:
    """The hit rate of one policy at one capacity; `capacity_gib` where a model is named."""

    policy: str
    block_size: int
    capacity_blocks: int
    capacity_gib: float | None
    hit_rate: float


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """The least LRU capacity that reaches a share of the ceiling; the knee has `share_of_ceiling` as it fell."""

    label: str
    share_of_ceiling: float
    capacity_blocks: int
    capacity_gib: float | None
    hit_rate: float


@dataclass(frozen=True, slots=True)
class BlockSizeRow:
    """The infinite cache's hit rate if only whole blocks of this size match, and the shared blocks' mean waste."""

    block_size: int
    hit_rate: float
    lost_to_rounding: float
    """Share of prompt tokens that match to the token but not in whole blocks."""


@dataclass(frozen=True, slots=True)
class TierRow:
    """What a second tier behind the pool would serve of what the pool has evicted."""

    tier: str
    pool_blocks: int
    tier_blocks: int | None
    """None: without limit."""
    tier_gib: float | None
    hit_rate: float
    gain: float


def gib(blocks: int, block_size: int, kv: KvSize | None) -> float | None:
    return None if kv is None else blocks * block_size * kv.bytes_per_cached_token / 2**30


def default_capacities(curve: HitCurve) -> list[int]:
    """Ten capacities, evenly spaced in their logarithm, up to the one beyond which nothing is gained."""
    top = max(int(curve.capacities[-1]), 1)
    points = np.geomspace(max(top / 512, 1), top, DEFAULT_POINTS)
    return sorted({_two_digits(point) for point in points[:-1]} | {top})


def _two_digits(value: float) -> int:
    scale = 10 ** max(int(math.log10(max(value, 1))) - 1, 0)
    return int(max(1, round(value / scale) * scale))


def plotted(curve: HitCurve) -> tuple[tuple[int, float], ...]:
    """Points of the exact curve, at most CURVE_POINTS: from zero, evenly in the logarithm, to the end."""
    steps = np.geomspace(1, max(int(curve.capacities[-1]), 1), CURVE_POINTS - 1)
    capacities = np.unique(np.concatenate([[0], np.rint(steps).astype(np.int64)]))
    return tuple((int(c), float(r)) for c, r in zip(capacities, curve.hit_rate(capacities), strict=True))


def curve_rows(
    measured: Measured,
    curve: HitCurve,
    capacities: Sequence[int],
    policies: Sequence[str],
    kv: KvSize | None,
) -> Table[CurveRow]:
    """LRU from the exact curve, other policies by replaying the log, and the clairvoyant bound, at each capacity."""
    size = measured.trace.block_size

    def row(policy: str, capacity: int, rate: float) -> CurveRow:
        return CurveRow(policy, size, capacity, gib(capacity, size, kv), rate)

    rows = [row(LRU, capacity, curve.hit_rate(capacity)) for capacity in capacities]
    rates = policy_hit_rates(measured.trace, policies, capacities)
    rows += [row(policy, capacity, rate) for (policy, capacity), rate in rates.items()]
    rows += [row(CLAIRVOYANT, bound.capacity, bound.hit_rate) for bound in clairvoyant(measured.trace, capacities)]
    return Table(rows)


def capacity_rows(curve: HitCurve, kv: KvSize | None) -> Table[CapacityRow]:
    """The knee, and what 90, 95 and 99 % of the ceiling take."""
    size = curve.block_size
    ceiling = max(curve.ceiling, 1e-12)
    rows = []
    knee = knee_of(curve)
    rows.append(CapacityRow("knee", curve.hit_rate(knee) / ceiling, knee, gib(knee, size, kv), curve.hit_rate(knee)))
    for share in SHARES_OF_CEILING:
        capacity = curve.capacity_for(share)
        rows.append(CapacityRow(f"{share:.0%}", share, capacity, gib(capacity, size, kv), curve.hit_rate(capacity)))
    return Table(rows)


def knee_of(curve: HitCurve) -> int:
    """The capacity farthest above the straight line from nothing to everything (Satopaa et al., "Finding a 'Kneedle'
    in a haystack", 2011): before it capacity pays more than its share, after it less."""
    top = max(int(curve.capacities[-1]), 1)
    most = max(int(curve.hit_blocks[-1]), 1)
    lift = curve.hit_blocks / most - curve.capacities / top
    return int(curve.capacities[int(np.argmax(lift))])


def block_size_rows(measured: Measured, unit: int) -> Table[BlockSizeRow]:
    """What each block size would cost. Exact: an infinite cache serves floor(match / size) whole blocks.

    `unit` is the finest size the log can tell: 1 where it has tokens, the trace's own block size where it has hashes.
    """
    sizes = [size for size in BLOCK_SIZES if size >= unit and size % unit == 0]
    sizes = sorted({*sizes, unit, measured.trace.block_size})
    exact = measured.rate(measured.exact_tokens)
    most = np.maximum(measured.lengths - 1, 0)
    rows = []
    for size in sizes:
        hits = np.minimum(measured.exact_tokens, most) // size * size
        rate = measured.rate(hits)
        rows.append(BlockSizeRow(size, rate, exact - rate))
    return Table(rows)


def tier_rows(measured: Measured, curve: HitCurve, pool_blocks: int, kv: KvSize | None) -> Table[TierRow]:
    """What host memory (two and eight times the pool) and disk (no limit) behind a pool would serve, as LRU's stack
    property gives it: pool and tier together hold what one pool of both sizes would."""
    size = measured.trace.block_size
    base = curve.hit_rate(pool_blocks)
    rows = [TierRow("none", pool_blocks, 0, 0.0 if kv else None, base, 0.0)]
    for label, times in (("host memory, 2x", 2), ("host memory, 8x", 8)):
        blocks = times * pool_blocks
        rate = curve.hit_rate(pool_blocks + blocks)
        rows.append(TierRow(label, pool_blocks, blocks, gib(blocks, size, kv), rate, rate - base))
    rows.append(TierRow("disk, no limit", pool_blocks, None, None, curve.ceiling, curve.ceiling - base))
    return Table(rows)


def parse_capacity(text: str, block_size: int, kv: KvSize | None) -> int:
    """Blocks from `12000`, or from `40GiB`, `200GB`, `512MiB` of a named model's KV.

    Raises:
        ValueError: it is no number, its unit is unknown, or it is in bytes and no model is named.
    """
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
    plain = text.strip().lower().replace("_", "")
    unit = next((name for name in units if plain.endswith(name)), None)
    number = plain.removesuffix(unit) if unit else plain.removesuffix("blocks")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"capacity is {text!r}; expected blocks (10000) or bytes of the model (40GiB)") from None
    if not value >= 0:
        raise ValueError(f"capacity is {text!r}; expected a number of at least 0")
    if unit is None:
        return int(value)
    if kv is None:
        raise ValueError(f"capacity {text!r} is in bytes; name the model whose KV it holds with --model")
    return int(value * units[unit] // (kv.bytes_per_cached_token * block_size))
