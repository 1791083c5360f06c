"""From records to the figures people compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caudex.bench.client import Record


@dataclass(frozen=True, slots=True)
class Summary:
    """One scene, played `repeats` times one way. Times in seconds, tokens as the server counted them.

    A request is hot when the cache gave at least half of its prompt; where the server does not say, when its prefix
    had been sent before. `hit_rate` is cached over prompt tokens, None where the server does not say.
    """

    scene: str
    cold_prompts: bool
    repeats: int
    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int | None
    hit_rate: float | None
    ttft_p50_cold: float | None
    ttft_p50_hot: float | None
    ttft_p50: float | None
    ttft_p90: float | None
    inter_token_p50: float | None
    inter_token_p99: float | None
    output_tokens_per_second: float
    wall: float
    wall_each: tuple[float, ...]


def summarize(scene: str, cold_prompts: bool, records: Sequence[Record], walls: Sequence[float]) -> Summary:
    """Summarise all repeats of a scene. `walls` has each repeat's duration; `wall` is their median."""
    good = [record for record in records if record.error is None]
    prompt = sum(record.prompt_tokens or 0 for record in good)
    told = [record.cached_tokens for record in good if record.cached_tokens is not None]
    cached = sum(told) if told else None
    gaps = [gap for record in good for gap in record.gaps]
    return Summary(
        scene=scene,
        cold_prompts=cold_prompts,
        repeats=len(walls),
        requests=len(records),
        errors=len(records) - len(good),
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_rate=None if cached is None or not prompt else cached / prompt,
        ttft_p50_cold=percentile([record.ttft for record in good if not is_hot(record)], 0.5),
        ttft_p50_hot=percentile([record.ttft for record in good if is_hot(record)], 0.5),
        ttft_p50=percentile([record.ttft for record in good], 0.5),
        ttft_p90=percentile([record.ttft for record in good], 0.9),
        inter_token_p50=percentile(gaps, 0.5),
        inter_token_p99=percentile(gaps, 0.99),
        output_tokens_per_second=sum(record.completion_tokens or 0 for record in good) / sum(walls),
        wall=percentile(walls, 0.5) or 0.0,
        wall_each=tuple(walls),
    )


def is_hot(record: Record) -> bool:
    if record.cached_tokens is None or not record.prompt_tokens:
        return not record.first
    return 2 * record.cached_tokens >= record.prompt_tokens


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed (nearest rank); None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
