"""Running a request log through the real cache, without a model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caudex import _core
from caudex.cache.block_trace import BlockTrace
from caudex.cache.policy import Policy
from caudex.cache.prefix_cache import Index, Sharing
from caudex.cache.token_trace import TokenTrace

Progress = Callable[[int, int], None]
"""Called with the requests done and to do, over all settings."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """A cache to run a log through."""

    num_blocks: int
    policy: str | Policy = "lru"
    """A name with its parameter, if any ("ttl:300"), or a policy in Python, which serves this run alone."""
    index: Index = "radix"
    block_size: int = 16
    """Tokens a block. A log of block ids has its own block size, and ignores this one."""
    sharing: Sharing = "shared"
    """What the log's tenants see of each other, as in PrefixCache."""
    k: int = 2
    """For `sharing="k_anonymous"`."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What one cache served of a log."""

    settings: ReplaySettings
    hit_tokens: NDArray[np.int64]
    """(requests,), prompt tokens served from the cache."""
    prompt_tokens: int
    evicted_blocks: int
    thrashed_blocks: int
    """Blocks that were computed again while their eviction was among the last `num_blocks`."""
    num_cached_blocks: int
    """At the end."""

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens served from the cache."""
        return int(self.hit_tokens.sum()) / max(self.prompt_tokens, 1)


_Core = Callable[[ReplaySettings, Callable[[int], None]], tuple[NDArray[np.int64], _core.CacheStats, int]]
"""Runs a log through a cache with these settings, reporting the requests done."""


def replay(
    trace: BlockTrace | TokenTrace,
    settings: Sequence[ReplaySettings],
    progress: Progress | None = None,
    max_threads: int | None = None,
) -> list[ReplayResult]:
    """Run a log through one new cache for each of `settings`, several at a time; results come in their order.

    Requests run one after another, each finished before the next begins, on the log's clock; without timestamps they
    are one second apart. A request that is longer than the whole pool keeps its first blocks. It is the cache that
    serves an engine which runs here, at its full speed and without the GIL.
    """
    run_core = _blocks_in_core(trace) if isinstance(trace, BlockTrace) else _tokens_in_core(trace)
    meter = _Meter(len(settings) * len(trace), progress)
    with ThreadPoolExecutor(max_threads or os.cpu_count() or 1) as pool:
        runs = [pool.submit(_result, trace, run_core, setting, meter, i) for i, setting in enumerate(settings)]
        try:
            return [run.result() for run in runs]
        except BaseException:  # Ctrl-C as well: let no run go on to its end
            meter.stopped.set()
            raise


def _result(
    trace: BlockTrace | TokenTrace, run_core: _Core, settings: ReplaySettings, meter: _Meter, run: int
) -> ReplayResult:
    hits, stats, num_cached = run_core(settings, lambda done: meter.advance(run, done))
    of_blocks = isinstance(trace, BlockTrace)
    return ReplayResult(
        settings=settings,
        hit_tokens=hits * trace.block_size if isinstance(trace, BlockTrace) else hits,
        prompt_tokens=trace.prompt_tokens,
        evicted_blocks=stats.evicted_blocks,
        thrashed_blocks=stats.thrashed_tokens // (1 if of_blocks else settings.block_size),
        num_cached_blocks=num_cached,
    )


def _tokens_in_core(trace: TokenTrace) -> _Core:
    columns = _columns(trace)
    return lambda settings, advance: _core.replay_tokens(
        trace.tokens,
        trace.offsets,
        trace.prompt_lengths,
        columns,
        settings.num_blocks,
        settings.block_size,
        settings.index,
        settings.policy,
        settings.sharing,
        settings.k,
        advance,
    )


def _blocks_in_core(trace: BlockTrace) -> _Core:
    columns, reusable = _columns(trace), trace.num_reusable_blocks
    return lambda settings, advance: _core.replay_blocks(
        trace.paths,
        reusable,
        trace.output_lengths,
        columns,
        settings.num_blocks,
        trace.block_size,
        settings.index,
        settings.policy,
        settings.sharing,
        settings.k,
        advance,
    )


def _columns(trace: BlockTrace | TokenTrace) -> _core.ReplayColumns:
    return _core.ReplayColumns(
        trace.timestamps, trace.tenants, trace.sessions, trace.expected_returns, trace.session_ends, trace.priorities
    )


@dataclass(slots=True)
class _Meter:
    """Adds up the progress of all runs, and stops them."""

    total: int
    report: Progress | None
    stopped: threading.Event = field(default_factory=threading.Event)
    done: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, run: int, done: int) -> None:
        if self.stopped.is_set():
            raise InterruptedError("the replay was stopped")
        with self.lock:
            self.done[run] = done
            if self.report is not None:
                self.report(sum(self.done.values()), self.total)
