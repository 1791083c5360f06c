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


@dataclass(frozen=True, slots=True)
class _Columns:
    """A log as the core reads it; a log of block ids is one of tokens at a block size of 1."""

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64]
    hit_limits: NDArray[np.int64] | None
    kept_lengths: NDArray[np.int64]
    times: NDArray[np.float64]
    unseen_output: NDArray[np.int64] | None
    tenants: NDArray[np.int64] | None
    block_size: int | None
    """The size that the cache must have, if the log fixes it."""
    tokens_per_slot: int
    prompt_tokens: int


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
    columns = _block_columns(trace) if isinstance(trace, BlockTrace) else _token_columns(trace)
    meter = _Meter(len(settings) * len(trace), progress)
    with ThreadPoolExecutor(max_threads or os.cpu_count() or 1) as pool:
        runs = [pool.submit(_run, columns, setting, meter, i) for i, setting in enumerate(settings)]
        try:
            return [run.result() for run in runs]
        except BaseException:  # Ctrl-C as well: let no run go on to its end
            meter.stopped.set()
            raise


def _run(columns: _Columns, settings: ReplaySettings, meter: _Meter, run: int) -> ReplayResult:
    hits, stats, num_cached = _core.replay(
        columns.tokens,
        columns.offsets,
        columns.prompt_lengths,
        columns.hit_limits,
        columns.kept_lengths,
        columns.times,
        columns.unseen_output,
        columns.tenants,
        settings.num_blocks,
        columns.block_size or settings.block_size,
        settings.index,
        settings.policy,
        settings.sharing,
        settings.k,
        columns.tokens_per_slot,
        lambda done: meter.advance(run, done),
    )
    return ReplayResult(
        settings=settings,
        hit_tokens=hits * columns.tokens_per_slot,
        prompt_tokens=columns.prompt_tokens,
        evicted_blocks=stats.evicted_blocks,
        thrashed_blocks=stats.thrashed_tokens // (columns.block_size or settings.block_size),
        num_cached_blocks=num_cached,
    )


def _token_columns(trace: TokenTrace) -> _Columns:
    lengths = np.diff(trace.offsets)
    return _Columns(
        tokens=trace.tokens,
        offsets=trace.offsets,
        prompt_lengths=trace.prompt_lengths,
        hit_limits=None,
        # The last generated token is never fed back, so its KV is not written.
        kept_lengths=np.where(lengths > trace.prompt_lengths, lengths - 1, lengths),
        times=_times(trace),
        unseen_output=None,
        tenants=trace.tenants,
        block_size=None,
        tokens_per_slot=1,
        prompt_tokens=trace.prompt_tokens,
    )


def _block_columns(trace: BlockTrace) -> _Columns:
    """Lay out each request's full blocks as tokens, and one token more, which is never kept.

    The cache leaves the last token of a prompt to compute: here that one. A prompt that ends with a full block computes
    it again, which is not a hit; but its copy in the cache, if there is one, is the request's own and protected.
    """
    full = trace.num_full_blocks
    lengths = full + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    is_last = np.zeros(offsets[-1], dtype=bool)
    is_last[offsets[1:] - 1] = True
    source = np.arange(offsets[-1]) + np.repeat(trace.offsets[:-1] - offsets[:-1], lengths)
    tokens = np.zeros(offsets[-1], dtype=np.int32)
    tokens[~is_last] = _dense(trace.block_ids)[source[~is_last]]
    return _Columns(
        tokens=tokens,
        offsets=offsets,
        prompt_lengths=lengths,
        hit_limits=np.minimum(full, np.maximum(trace.input_lengths - 1, 0) // trace.block_size),
        kept_lengths=full,
        times=_times(trace),
        unseen_output=trace.output_lengths,
        tenants=trace.tenants,
        block_size=1,
        tokens_per_slot=trace.block_size,
        prompt_tokens=trace.prompt_tokens,
    )


def _dense(block_ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return ids as 31-bit ones: as they are, if they fit."""
    if block_ids.size == 0 or (block_ids.min() >= 0 and block_ids.max() <= np.iinfo(np.int32).max):
        return block_ids.astype(np.int32)
    return np.unique(block_ids, return_inverse=True)[1].astype(np.int32)


def _times(trace: BlockTrace | TokenTrace) -> NDArray[np.float64]:
    return np.arange(len(trace), dtype=np.float64) if trace.timestamps is None else trace.timestamps


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
