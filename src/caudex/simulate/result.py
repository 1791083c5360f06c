"""What a simulation found, and how it is summed up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user is content with, in seconds: time to first token, and between tokens."""

    ttft: float = 2.0
    tpot: float = 0.1


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Figures by request, in order of arrival; NaN times for what did not happen.

    Every request is one of finished, refused, and unfinished (of a run that was broken off).
    """

    policy: str
    arrivals: NDArray[np.float64]
    first_tokens: NDArray[np.float64]
    finishes: NDArray[np.float64]
    refused: NDArray[np.bool_]
    input_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    replicas: NDArray[np.int32]
    retries: NDArray[np.int32]
    computed_by_replica: NDArray[np.float64]
    """Prompt tokens that each replica computed, those for requests that it lost included."""
    busy_seconds: NDArray[np.float64]
    infinite_cache_hits: NDArray[np.int64]
    """Tokens of each request that one cache without end would have had."""

    @property
    def ttft(self) -> NDArray[np.float64]:
        return self.first_tokens - self.arrivals

    @property
    def tpot(self) -> NDArray[np.float64]:
        """Seconds between tokens, mean of each request; NaN where there was one token."""
        gaps = np.where(self.output_lengths > 1, self.output_lengths - 1, np.nan)
        return (self.finishes - self.first_tokens) / gaps

    def summary(self, slo: Slo) -> dict[str, Any]:
        """Plain numbers: seconds, tokens, shares; None where there is nothing to tell. Hits and shares are of the
        requests that saw a first token. Same input, same output, to the bit."""
        done, served = ~np.isnan(self.finishes), ~np.isnan(self.first_tokens)
        duration = float(np.nanmax(self.finishes) - self.arrivals[0]) if done.any() else 0.0
        good = done & (self.ttft <= slo.ttft) & ~(self.tpot > slo.tpot)
        computed, num_requests = self.computed_by_replica, len(self.arrivals)
        prompt_tokens = int(self.input_lengths[served].sum())
        needed = prompt_tokens - int(self.infinite_cache_hits[served].sum())
        return {
            "policy": self.policy,
            "requests": num_requests,
            "finished": int(done.sum()),
            "refused": int(self.refused.sum()),
            "unfinished": int((~done & ~self.refused).sum()),
            "retried": int((self.retries > 0).sum()),
            "seconds": duration,
            "prompt_tokens": prompt_tokens,
            "hit_rate": _ratio(self.cached_tokens[served].sum(), prompt_tokens),
            "infinite_cache_hit_rate": _ratio(prompt_tokens - needed, prompt_tokens),
            "computed_tokens": int(computed.sum()),
            "recomputed_tokens": int(computed.sum()) - needed,
            "imbalance": _ratio(computed.max(), computed.mean()),
            "ttft": _percentiles(self.ttft),
            "tpot": _percentiles(self.tpot),
            "slo_share": _ratio(good.sum(), num_requests),
            "goodput_requests_per_second": _ratio(good.sum(), duration),
            "output_tokens_per_second": _ratio(self.output_lengths[done].sum(), duration),
            "utilisation": _ratio(self.busy_seconds.sum(), duration * len(computed)),
        }

    def around(self, time: float, seconds: float, slo: Slo) -> dict[str, dict[str, Any]]:
        """What users saw so many seconds before and after a moment, which is told in seconds from the first arrival."""
        return {"before": self.window(time - seconds, time, slo), "after": self.window(time, time + seconds, slo)}

    def window(self, begin: float, end: float, slo: Slo) -> dict[str, Any]:
        """Figures of the requests that arrived from `begin` to before `end`, as in `summary`. What they recomputed is
        what one cache without end would have spared them."""
        times = self.arrivals - self.arrivals[0]
        inside = (times >= begin) & (times < end)
        served = inside & ~np.isnan(self.first_tokens)
        good = inside & ~np.isnan(self.finishes) & (self.ttft <= slo.ttft) & ~(self.tpot > slo.tpot)
        return {
            "requests": int(inside.sum()),
            "retried": int((self.retries[inside] > 0).sum()),
            "hit_rate": _ratio(self.cached_tokens[served].sum(), self.input_lengths[served].sum()),
            "recomputed_tokens": int((self.infinite_cache_hits - self.cached_tokens)[served].sum()),
            "ttft": _percentiles(self.ttft[inside]),
            "slo_share": _ratio(good.sum(), inside.sum()),
        }


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _percentiles(values: NDArray[np.float64]) -> dict[str, float | None]:
    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return {"mean": float(known.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
