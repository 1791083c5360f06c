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
    """Figures by request, in order of arrival; NaN times for those that were refused."""

    policy: str
    arrivals: NDArray[np.float64]
    first_tokens: NDArray[np.float64]
    finishes: NDArray[np.float64]
    input_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    cached_tokens: NDArray[np.int64]
    replicas: NDArray[np.int32]
    retries: NDArray[np.int32]
    computed_by_replica: NDArray[np.float64]
    """Prompt tokens that each replica computed, those for requests that it lost included."""
    busy_seconds: NDArray[np.float64]
    infinite_cache_hits: int

    @property
    def ttft(self) -> NDArray[np.float64]:
        return self.first_tokens - self.arrivals

    @property
    def tpot(self) -> NDArray[np.float64]:
        """Seconds between tokens, mean of each request; NaN where there was one token."""
        gaps = np.where(self.output_lengths > 1, self.output_lengths - 1, np.nan)
        return (self.finishes - self.first_tokens) / gaps

    def summary(self, slo: Slo) -> dict[str, Any]:
        """Plain numbers: seconds, tokens, shares. Same input, same output, to the bit."""
        done = ~np.isnan(self.finishes)
        duration = float(np.nanmax(self.finishes) - self.arrivals[0]) if done.any() else 0.0
        good = done & (self.ttft <= slo.ttft) & ~(self.tpot > slo.tpot)
        computed = self.computed_by_replica
        prompt_tokens = int(self.input_lengths.sum())
        return {
            "policy": self.policy,
            "requests": len(self.arrivals),
            "finished": int(done.sum()),
            "refused": int((~done).sum()),
            "retried": int((self.retries > 0).sum()),
            "seconds": duration,
            "prompt_tokens": prompt_tokens,
            "hit_rate": float(self.cached_tokens.sum() / prompt_tokens),
            "infinite_cache_hit_rate": self.infinite_cache_hits / prompt_tokens,
            "computed_tokens": int(computed.sum()),
            "recomputed_tokens": int(computed.sum()) - (prompt_tokens - self.infinite_cache_hits),
            "imbalance": float(computed.max() / computed.mean()) if computed.sum() else 1.0,
            "ttft": _percentiles(self.ttft),
            "tpot": _percentiles(self.tpot),
            "slo_share": float(good.sum() / len(self.arrivals)),
            "goodput_requests_per_second": float(good.sum() / duration) if duration else 0.0,
            "output_tokens_per_second": float(self.output_lengths[done].sum() / duration) if duration else 0.0,
            "utilisation": float(self.busy_seconds.sum() / duration / len(computed)) if duration else 0.0,
        }


def _percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return {name: float("nan") for name in ("mean", "p50", "p90", "p99")}
    p50, p90, p99 = np.percentile(known, [50, 90, 99])
    return {"mean": float(known.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
