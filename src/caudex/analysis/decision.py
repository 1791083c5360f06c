"""From what was measured to what to do: whether to cache, how much, in what blocks, and the flags that say so."""

from __future__ import annotations

from dataclasses import dataclass

from caudex.analysis.curves import BlockSizeRow, CapacityRow, CurveRow
from caudex.analysis.kv_size import KvSize
from caudex.analysis.models import KNOWN_MODELS, Gpu, find_gpu
from caudex.analysis.replicas import RoutingRow
from caudex.analysis.tables import Table

WORTH_IT = 0.02
ROUNDING_WORTH_MENDING = 0.01
MODEL_FLOPS_UTILISATION = 0.45
DEFAULT_PREFILL_RATE = 8_000.0
USABLE_MEMORY = 0.90


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


def decide(
    *,
    hit_rate: float,
    token_hit_rate: float,
    mean_prompt_tokens: float,
    capacities: Table[CapacityRow],
    curve: Table[CurveRow],
    block_sizes: Table[BlockSizeRow],
    routing: Table[RoutingRow] | None,
    kv: KvSize | None,
    gpu: Gpu | None,
    prefill_rate: float | None,
    pool_blocks: int | None,
) -> Decision:
    """Weighs the measurements. Pure arithmetic on what was measured; every judgement is a named constant above."""
    enable = hit_rate >= WORTH_IT
    size, size_reason = _block_size(block_sizes)
    target = next((row for row in capacities if row.label == "95%"), capacities[-1])
    capacity, capacity_reason = _capacity(target, pool_blocks)
    expected = min(_interpolated(curve, capacity), max(hit_rate, 0.0)) if enable else 0.0
    policy, policy_reason = _policy(curve, capacity)
    rate, assumption = prefill_speed(kv, gpu, prefill_rate)
    routed = _routing(routing)
    speed = _speed(expected, mean_prompt_tokens, rate, assumption)
    reasons = [capacity_reason, size_reason, policy_reason]
    if routed is not None:
        reasons.append(routed[1])
    return Decision(
        enable=enable,
        headline=_headline(enable, hit_rate, expected),
        capacity_blocks=capacity,
        capacity_gib=target.capacity_gib if capacity == target.capacity_blocks else None,
        block_size=size,
        index="radix",
        policy=policy,
        routing=routed[0] if routed else None,
        expected_hit_rate=expected,
        speed=speed,
        flags=engine_flags(enable, size, capacity * curve[0].block_size if len(curve) else 0, kv),
        reasons=tuple(reasons),
    )


def _headline(enable: bool, hit_rate: float, expected: float) -> str:
    if not enable:
        return f"Leave prefix caching at its default: an infinite cache would serve {hit_rate:.1%} of prompt tokens"
    return f"Cache prefixes: {expected:.1%} of prompt tokens need not be computed (ceiling {hit_rate:.1%})"


def _capacity(target: CapacityRow, pool_blocks: int | None) -> tuple[int, str]:
    if pool_blocks is not None and pool_blocks < target.capacity_blocks:
        return pool_blocks, (
            f"the GPU holds {pool_blocks:,} blocks beside the weights; 95 % of the ceiling would take "
            f"{target.capacity_blocks:,}: a host-memory tier fills the gap"
        )
    return target.capacity_blocks, f"{target.capacity_blocks:,} blocks reach 95 % of the ceiling; more brings little"


def _block_size(rows: Table[BlockSizeRow]) -> tuple[int, str]:
    """The largest size that loses under a point of the exact hits, since large blocks are cheaper to manage."""
    fitting = [row for row in rows if row.lost_to_rounding <= ROUNDING_WORTH_MENDING]
    usual = [row for row in fitting if row.block_size >= 16] or list(fitting) or list(rows)
    best = max(usual, key=lambda row: row.block_size) if fitting else min(usual, key=lambda row: row.lost_to_rounding)
    return best.block_size, f"blocks of {best.block_size} tokens lose {best.lost_to_rounding:.2%} of prompt tokens to rounding"


def _interpolated(curve: Table[CurveRow], capacity: int) -> float:
    rows = sorted((row for row in curve if row.policy == "lru"), key=lambda row: row.capacity_blocks)
    best = 0.0
    for row in rows:
        if row.capacity_blocks <= capacity:
            best = max(best, row.hit_rate)
    above = next((row for row in rows if row.capacity_blocks >= capacity), None)
    return max(best, above.hit_rate if above is not None and above.capacity_blocks == capacity else best)


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
    return best, f"{best} serves {rates.get(best, 0.0):.1%} at {near:,} blocks; no policy could serve more than {bound:.1%}"


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
        return DEFAULT_PREFILL_RATE, f"prefill at {DEFAULT_PREFILL_RATE:,.0f} tokens/s, assumed (name --model and --gpu, or give --prefill-rate)"
    rate = MODEL_FLOPS_UTILISATION * gpu.flops / (2 * kv.parameters)
    return rate, (
        f"prefill at {rate:,.0f} tokens/s: 2 operations a parameter ({kv.parameters / 1e9:.3g}B active), "
        f"{MODEL_FLOPS_UTILISATION:.0%} of {gpu.name}'s {gpu.flops / 1e12:,.0f} TFLOP/s; attention's own share left out"
    )


def _speed(hit_rate: float, mean_prompt: float, rate: float, assumption: str) -> Speed:
    without = mean_prompt / rate
    with_cache = mean_prompt * (1 - hit_rate) / rate
    return Speed(rate, without, with_cache, 1 / max(1 - hit_rate, 1e-3), assumption)


def pool_blocks_on(gpu: Gpu | str, kv: KvSize, block_size: int) -> int | None:
    """Blocks that fit beside the model's 16-bit weights in 90 % of a GPU's memory; None where the model does not fit
    or its size is not known."""
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    known = KNOWN_MODELS.get(kv.model)
    total = known["total_parameters"] if known else kv.parameters
    if not total:
        return None
    left = USABLE_MEMORY * gpu.memory - 2 * total
    return int(left // (kv.bytes_per_cached_token * block_size)) if left > 0 else None


def engine_flags(enable: bool, block_size: int, capacity_tokens: int, kv: KvSize | None) -> dict[str, str]:
    """The command lines that set this up, by engine."""
    model = kv.model if kv is not None else "MODEL"
    if not enable:
        return {
            "vllm": f"vllm serve {model} --no-enable-prefix-caching",
            "sglang": f"python -m sglang.launch_server --model-path {model} --disable-radix-cache",
            "tensorrt-llm": f"trtllm-serve {model} --extra_llm_api_options cache.yaml  # kv_cache_config: {{enable_block_reuse: false}}",
            "llama.cpp": f"llama-server -m {model}.gguf --cache-ram 0",
        }
    nbytes = None if kv is None else capacity_tokens * kv.bytes_per_cached_token
    vllm_size = f" --kv-cache-memory-bytes {int(nbytes)}" if nbytes else ""
    trt_size = f", max_tokens: {capacity_tokens}"
    ram = f" --cache-ram {max(1, round(nbytes / 2**20))}" if nbytes else ""
    block = max(block_size, 16)
    return {
        "vllm": f"vllm serve {model} --enable-prefix-caching --block-size {block}{vllm_size}",
        "sglang": f"python -m sglang.launch_server --model-path {model} --page-size {block_size} --max-total-tokens {capacity_tokens}",
        "tensorrt-llm": (
            f"trtllm-serve {model} --extra_llm_api_options cache.yaml  "
            f"# kv_cache_config: {{enable_block_reuse: true, enable_partial_reuse: true, tokens_per_block: {_power_of_two(block)}{trt_size}}}"
        ),
        "llama.cpp": f"llama-server -m {model}.gguf --cache-reuse 0 -c {capacity_tokens}{ram}",
    }


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 1).bit_length() if value & (value - 1) else value
