"""The log line that says every few seconds what the engine is doing, while it is doing anything."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from caudex.engine.types import EngineStats

if TYPE_CHECKING:
    from caudex.engine.engine import Engine

log = logging.getLogger("caudex.server.activity")


class ActivityLog:
    """Compares the engine's counters now and an interval ago. Silent between two equal idle states."""

    def __init__(self, engine: Engine, interval: float) -> None:
        self._engine = engine
        self._interval = interval
        self._previous = engine.stats()
        self._read_at = time.perf_counter()

    async def run(self) -> None:
        """Write lines until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self.write()

    def write(self) -> None:
        stats, now = self._engine.stats(), time.perf_counter()
        before, seconds = self._previous, now - self._read_at
        self._previous, self._read_at = stats, now
        if stats.num_requests_running or stats.num_requests_waiting or work_done(stats) > work_done(before):
            figures = activity(before, stats, seconds)
            log.info(TEXT, figures, extra={"figures": figures})


TEXT = (
    "running %(running)d, waiting %(waiting)d | prompt %(prompt_tokens_per_second).0f tok/s, "
    "generated %(generated_tokens_per_second).0f tok/s | prefix hit rate %(hit_rate_percent).1f %% "
    "(%(total_hit_rate_percent).1f %% since start) | "
    "blocks: %(pinned_blocks)d pinned, %(cached_blocks)d cached, %(free_blocks)d free"
)


def work_done(stats: EngineStats) -> int:
    return stats.prompt_tokens + stats.generation_tokens + sum(stats.requests_finished.values())


def activity(before: EngineStats, now: EngineStats, seconds: float) -> dict[str, float]:
    """Rates over an interval of `seconds` and gauges at its end. Prompt tokens include those the cache gave."""
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    return {
        "running": now.num_requests_running,
        "waiting": now.num_requests_waiting,
        "prompt_tokens_per_second": (now.prompt_tokens - before.prompt_tokens) / seconds,
        "generated_tokens_per_second": (now.generation_tokens - before.generation_tokens) / seconds,
        "hit_rate_percent": percent(hits, queries),
        "total_hit_rate_percent": percent(now.prefix_cache_hits, now.prefix_cache_queries),
        "pinned_blocks": now.num_pinned_blocks,
        "cached_blocks": now.num_cached_blocks,
        "free_blocks": now.num_free_blocks,
    }


def percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0
