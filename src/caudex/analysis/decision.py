"""From what was measured to what to do: whether to cache, how much, in what blocks, and the flags that say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from caudex.analysis.curves import BlockSizeRow, CapacityRow, CurveRow, gib
from caudex.analysis.flags import engine_flags
from caudex.analysis.mended import Mended
from caudex.analysis.replicas import RoutingRow
from caudex.analysis.tables import Table
from caudex.sizing.gpus import Gpu
from caudex.sizing.kv_size import KvSize

WORTH_IT = 0.02
WORTH_MENDING_FIRST = 0.05
ROUNDING_WORTH_MENDING = 0.005
BLOCK_SIZES_TO_ADVISE = (16, 128)
MODEL_FLOPS_UTILISATION = 0.45
DEFAULT_PREFILL_RATE = 8_000.0


@dataclass(frozen=True, slots=True)
class Speed:
    """What hits do to the first token. Mean prefill seconds a request, and how many times the requests one GPU can
    prefill, with `assumption` in words."""

    prefill_rate: float
    prefill_seconds_without: float
    prefill_seconds_with: float
    prefill_capacity_gain: float
    assumption: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer. `flags` are command lines by engine."""

    enable: bool
    headline: str
    capacity_blocks: int
    capacity_gib: float | None
    block_size: int
    index: str
    policy: str
    routing: str | None
    expected_hit_rate: float
    speed: Speed
    flags: dict[str, str]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a decision rests on. `lru_at` is the exact curve of the log as it is; `mended` the log without breakers."""

    hit_rate: float
    mean_prompt_tokens: float
    capacities: Table[CapacityRow]
    curve: Table[CurveRow]
    lru_at: Callable[[int], float]
    block_size: int
    block_sizes: Table[BlockSizeRow]
    mended: Mended | None
    routing: Table[RoutingRow] | None
    kv: KvSize | None
    gpu: Gpu | None
    prefill_rate: float | None
    pool_blocks: int | None

    @property
    def mend_first(self) -> bool:
        return self.mended is not None and self.mended.hit_rate - self.hit_rate >= WORTH_MENDING_FIRST


def decide(evidence: Evidence) -> Decision:
    """Weighs the measurements. Pure arithmetic on what was measured; every judgement is a named constant above.

    Where mending the prompts would bring much, the advice is for the mended log.
    """
    mended = evidence.mended if evidence.mend_first else None
    ceiling = evidence.hit_rate if mended is None else mended.hit_rate
    enable = ceiling >= WORTH_IT
    size, size_reason = _block_size(evidence)
    rows = {row.label: row for row in (evidence.capacities if mended is None else mended.capacities)}
    capacity, capacity_reason = _capacity(rows["99%"], evidence.pool_blocks)
    expected = 0.0
    if enable:
        expected = evidence.lru_at(capacity) if mended is None else mended.hit_rate_at(capacity)
    policy, policy_reason = _policy(evidence.curve, capacity)
    rate, assumption = prefill_speed(evidence.kv, evidence.gpu, evidence.prefill_rate)
    routed = _routing(evidence.routing)
    reasons = [capacity_reason, size_reason, policy_reason, *([routed[1]] if routed else [])]
    return Decision(
        enable=enable,
        headline=_headline(enable, evidence, ceiling, expected),
        capacity_blocks=capacity,
        capacity_gib=gib(capacity, evidence.block_size, evidence.kv),
        block_size=size,
        index="radix",
        policy=policy,
        routing=routed[0] if routed else None,
        expected_hit_rate=expected,
        speed=_speed(expected, evidence.mean_prompt_tokens, rate, assumption),
        flags=engine_flags(enable, size, capacity * evidence.block_size, evidence.kv),
        reasons=tuple(reasons),
    )


def _headline(enable: bool, evidence: Evidence, ceiling: float, expected: float) -> str:
    if not enable:
        return f"A prefix cache brings nothing here: an infinite one would serve {ceiling:.1%} of prompt tokens"
    served = f"{expected:.1%} of prompt tokens need not be computed"
    if evidence.mend_first:
        return f"Mend the prompts, then cache prefixes: {served}; as they are, {evidence.hit_rate:.1%} at best"
    return f"Cache prefixes: {served} (ceiling {ceiling:.1%})"


def _capacity(target: CapacityRow, pool_blocks: int | None) -> tuple[int, str]:
    """The least that reaches 99 % of the ceiling, or what the GPU has where that is less."""
    if pool_blocks is not None and pool_blocks < target.capacity_blocks:
        return pool_blocks, (
            f"the GPU holds {pool_blocks:,} blocks beside the weights; 99 % of the ceiling would take "
            f"{target.capacity_blocks:,}: a host-memory tier fills the gap"
        )
    return target.capacity_blocks, f"{target.capacity_blocks:,} blocks reach 99 % of the ceiling; more brings little"


def _block_size(evidence: Evidence) -> tuple[int, str]:
    """The largest usual size that loses little of the exact hits, since large blocks are cheaper to manage."""
    if evidence.mend_first:
        return evidence.block_size, f"blocks of {evidence.block_size} tokens, as analysed"
    least, most = BLOCK_SIZES_TO_ADVISE
    rows = evidence.block_sizes
    fitting = [row for row in rows if row.lost_to_rounding <= ROUNDING_WORTH_MENDING]
    usual = [row for row in fitting if least <= row.block_size <= most] or fitting
    best = max(usual, key=lambda row: row.block_size) if usual else min(rows, key=lambda row: row.lost_to_rounding)
    lost = f"{best.lost_to_rounding:.2%} of prompt tokens"
    return best.block_size, f"blocks of {best.block_size} tokens lose {lost} to rounding"


def _policy(curve: Table[CurveRow], capacity: int) -> tuple[str, str]:
    """The policy that serves most near the capacity; LRU unless another is at least a point better."""
    points = sorted({row.capacity_blocks for row in curve})
    if not points:
        return "lru", "no capacity was tried"
    near = min(points, key=lambda point: abs(point - capacity))
    rates = {row.policy: row.hit_rate for row in curve if row.capacity_blocks == near}
    bound = rates.pop("clairvoyant", 0.0)
    best = max(rates, key=lambda name: rates[name])
    lru = rates.get("lru", 0.0)
    if rates[best] < lru + 0.01:
        best = "lru"
    return (
        best,
        f"{best} serves {rates.get(best, 0.0):.1%} at {near:,} blocks; no policy could serve more than {bound:.1%}",
    )


def _routing(rows: Table[RoutingRow] | None) -> tuple[str, str] | None:
    if rows is None:
        return None
    pool = next(row for row in rows if row.routing == "one pool")
    others = [row for row in rows if row.routing != "one pool"]
    best = max(others, key=lambda row: row.hit_rate - 0.1 * max(row.imbalance - 1.25, 0))
    robin = next(row for row in others if row.routing == "round robin")
    return best.routing, (
        f"over {best.replicas} replicas, {best.routing} serves {best.hit_rate:.1%}, round robin {robin.hit_rate:.1%}, "
        f"one pool of all memory {pool.hit_rate:.1%}"
    )


def prefill_speed(kv: KvSize | None, gpu: Gpu | None, measured_rate: float | None) -> tuple[float, str]:
    """Tokens a second of prefill on one GPU: as measured, or 2 operations a parameter at 45 % of the dense peak."""
    if measured_rate is not None:
        return measured_rate, f"prefill at {measured_rate:,.0f} tokens/s, as given"
    if kv is None or gpu is None or not kv.parameters:
        return (
            DEFAULT_PREFILL_RATE,
            f"prefill at {DEFAULT_PREFILL_RATE:,.0f} tokens/s, assumed (say --model and --gpu, or --prefill-rate)",
        )
    rate = MODEL_FLOPS_UTILISATION * gpu.flops_per_second / (2 * kv.parameters)
    return rate, (
        f"prefill at {rate:,.0f} tokens/s: 2 operations a parameter ({kv.parameters / 1e9:.3g}B active), "
        f"{MODEL_FLOPS_UTILISATION:.0%} of {gpu.name}'s {gpu.flops_per_second / 1e12:,.0f} TFLOP/s; "
        "attention's own share left out"
    )


def _speed(hit_rate: float, mean_prompt: float, rate: float, assumption: str) -> Speed:
    without = mean_prompt / rate
    with_cache = mean_prompt * (1 - hit_rate) / rate
    return Speed(rate, without, with_cache, 1 / max(1 - hit_rate, 1e-3), assumption)
