"""From a request log to a decision: the whole analysis in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from caudex.analysis.breakers.search import SEARCH_REQUESTS
from caudex.analysis.corpus import Corpus
from caudex.analysis.curves import (
    BlockSizeRow,
    CapacityRow,
    CurveRow,
    TierRow,
    block_size_rows,
    capacity_rows,
    curve_rows,
    default_capacities,
    parse_capacity,
    plotted,
    tier_rows,
)
from caudex.analysis.decision import Evidence, decide, prefill_speed
from caudex.analysis.findings import NOT_SEARCHED, search_breakers
from caudex.analysis.measure import Measured, Meter
from caudex.analysis.mended import Mended
from caudex.analysis.policies import check_policies, default_policies
from caudex.analysis.repetition import groups, repetition
from caudex.analysis.replicas import RoutingRow, routing_rows
from caudex.analysis.results import Analysis, ReadSummary, RecoveredTemplate, SharedPrefix
from caudex.analysis.tables import Table
from caudex.analysis.templates import recover_templates
from caudex.analysis.token_text import SHOWN_IDS
from caudex.analysis.tree import PrefixNode, prefix_tree
from caudex.cache.hit_curve import HitCurve, hit_curve
from caudex.sizing.gpus import Gpu, find_gpu
from caudex.sizing.kv_pool import pool_blocks_on
from caudex.sizing.kv_size import KvSize, kv_size
from caudex.trace.errors import TraceError
from caudex.trace.log import Log, open_log
from caudex.trace.table import TraceInfo
from caudex.trace.tokenizer import BytesTokenizer

DEFAULT_BLOCK_SIZE = 16
TIME_WINDOWS = 60
SHOWN_PREFIX_CHARS = 600

Stage = Callable[[str], None]


def analyze(
    log: str | Path,
    *,
    tokenizer: str | None = None,
    chat_template: str | Path | None = None,
    field: str | None = None,
    block_size: int | None = None,
    capacities: Sequence[int | str] | None = None,
    policies: Sequence[str] | None = None,
    model: str | Path | None = None,
    kv_dtype: str = "bf16",
    gpu: str | None = None,
    replicas: int = 1,
    prefill_rate: float | None = None,
    limit: int | None = None,
    breakers: bool = True,
    progress: Callable[[int, int], None] | None = None,
    stage: Stage = lambda _: None,
) -> Analysis:
    """Analyse a request log, hash trace or Parquet trace. The cache part is the real caches' replay.

    Args:
        tokenizer: a Hugging Face folder, tokenizer.json or hub id, a tiktoken name, or `bytes` (the default).
        field: the dotted path to the request in each line, where it is not found by itself.
        block_size: tokens a block; 16, or a hash trace's own. For a hash trace that does not say its own, it is that.
        capacities: blocks, or text with a unit ("40GiB") of the KV of `model`.
        policies: eviction policies to compare besides the clairvoyant bound.
        model, kv_dtype, gpu: a config.json, folder or well-known name; turns blocks into GiB and tokens into seconds.
        replicas: how many there are, for the routing what-if.
        prefill_rate: measured prefill tokens a second, in place of the arithmetic.

    Raises:
        TraceError: the log cannot be read, or says nothing about prefixes.
        ValueError: an option's value is not possible; the message names it.
    """
    _check(block_size, replicas, prefill_rate)
    options = _Options(
        kv=None if model is None else kv_size(model, kv_dtype),
        gpu=None if gpu is None else find_gpu(gpu),
        capacities=capacities,
        policies=check_policies(policies) if policies else default_policies(),
        replicas=replicas,
        prefill_rate=prefill_rate,
        breakers=breakers,
    )
    corpus = Corpus()
    opened = open_log(
        log, tokenizer=tokenizer, chat_template=chat_template, field=field, block_size=block_size, limit=limit,
        progress=progress, on_request=corpus.add if breakers else None,
    )  # fmt: skip
    return _analyzed(opened, corpus, _sizes(opened.info, block_size), options, stage)


@dataclass(frozen=True, slots=True)
class _Options:
    """What is asked about a log, besides how it is read."""

    kv: KvSize | None
    gpu: Gpu | None
    capacities: Sequence[int | str] | None
    policies: Sequence[str]
    replicas: int
    prefill_rate: float | None
    breakers: bool


def _analyzed(opened: Log, corpus: Corpus, sizes: tuple[int, int], options: _Options, stage: Stage) -> Analysis:
    """Reads the log, asks the caches, looks for breakers, decides: in this order, since each stands on those before.

    `sizes` are the block size and the finest that the log can tell.
    """
    size, unit = sizes
    kv, gpu = options.kv, options.gpu
    stage("reading")
    measured = _measure(opened, size)
    template = opened.template_description()
    stage("hit rate by capacity and policy")
    cached = _cache_answers(measured, options)
    stage("breakers")
    looked = options.breakers
    searched = search_breakers(opened, corpus, measured, size, unit, kv, stage) if looked else NOT_SEARCHED
    templates = _templates(opened, corpus, size) if looked else []
    stage("decision")
    block_sizes = block_size_rows(measured, unit)
    return Analysis(
        read=_read_summary(opened),
        kind=opened.info.kind,
        tokenizer=opened.info.tokenizer,
        template=template,
        block_size=size,
        requests=len(measured.lengths),
        prompt_tokens=measured.prompt_tokens,
        output_tokens=None if measured.trace.output_lengths is None else int(measured.trace.output_lengths.sum()),
        seconds=_seconds(measured),
        repetition=repetition(measured, prefill_speed(kv, gpu, options.prefill_rate)[0]),
        groups=groups(measured),
        curve=cached.rows,
        lru_knots=plotted(cached.curve),
        capacities=cached.capacities,
        block_sizes=block_sizes,
        tiers=cached.tiers,
        routing=cached.routing,
        breakers=searched.breakers,
        breakers_searched=searched.where,
        mended=searched.mended,
        templates=tuple(templates),
        prefixes=_shared_prefixes(measured, corpus, opened),
        reuse_over_time=_over_time(measured),
        kv=kv,
        gpu=None if gpu is None else gpu.name,
        decision=decide(_evidence(measured, cached, block_sizes, searched.mended, options)),
    )


@dataclass(frozen=True, slots=True)
class _CacheAnswers:
    """What the caches' replay says: at every capacity, by policy, behind tiers, over replicas."""

    curve: HitCurve
    rows: Table[CurveRow]
    capacities: Table[CapacityRow]
    pool_blocks: int | None
    tiers: Table[TierRow]
    routing: Table[RoutingRow] | None


def _cache_answers(measured: Measured, options: _Options) -> _CacheAnswers:
    """Tiers and replicas are asked about at the GPU's own pool, where a model and a GPU are named, else at the knee."""
    size, kv, gpu, replicas = measured.trace.block_size, options.kv, options.gpu, options.replicas
    curve = hit_curve(measured.trace)
    wanted = default_capacities(curve)
    if options.capacities:
        wanted = [parse_capacity(str(value), size, kv) for value in options.capacities]
    needed = capacity_rows(curve, kv)
    pool = pool_blocks_on(gpu, kv, size) if kv is not None and gpu is not None else None
    pool_or_knee = needed[0].capacity_blocks if pool is None else pool
    each = max(pool_or_knee // (replicas if pool is None else 1), 1)
    return _CacheAnswers(
        curve=curve,
        rows=curve_rows(measured, curve, wanted, options.policies, kv),
        capacities=needed,
        pool_blocks=pool,
        tiers=tier_rows(measured, curve, pool_or_knee, kv),
        routing=routing_rows(measured, replicas, each) if replicas > 1 else None,
    )


def _evidence(
    measured: Measured,
    cached: _CacheAnswers,
    block_sizes: Table[BlockSizeRow],
    mended: Mended | None,
    options: _Options,
) -> Evidence:
    return Evidence(
        hit_rate=measured.rate(measured.hit_tokens),
        mean_prompt_tokens=measured.prompt_tokens / len(measured.lengths),
        capacities=cached.capacities,
        curve=cached.rows,
        lru_at=cached.curve.hit_rate,
        block_size=measured.trace.block_size,
        block_sizes=block_sizes,
        mended=mended,
        routing=cached.routing,
        kv=options.kv,
        gpu=options.gpu,
        prefill_rate=options.prefill_rate,
        pool_blocks=cached.pool_blocks,
    )


def _check(block_size: int | None, replicas: int, prefill_rate: float | None) -> None:
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected at least 1 token")
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; expected at least 1")
    if prefill_rate is not None and not prefill_rate > 0:
        raise ValueError(f"prefill_rate is {prefill_rate}; expected tokens a second, above 0")


def _sizes(info: TraceInfo, block_size: int | None) -> tuple[int, int]:
    """The block size to analyse at and the finest the log can tell (a hash trace's own).

    Raises:
        ValueError: a hash trace cannot be cut into the blocks asked for.
    """
    if info.kind == "tokens":
        return block_size or DEFAULT_BLOCK_SIZE, 1
    own = info.block_size or 1
    size = block_size or own
    if size % own:
        raise ValueError(
            f"block_size is {size}; the trace has hashes of {own} tokens, so it must be a multiple of {own}"
        )
    return size, own


def _measure(opened: Log, size: int) -> Measured:
    encoder = opened.encoder
    ragged = int(opened.has_text and encoder is not None and encoder.tokenizer.name == BytesTokenizer.name)
    meter = Meter(opened.info, size, [] if encoder is None else encoder.turn_ends(), ragged_tokens=ragged)
    for batch in opened.batches:
        meter.add(batch)
    measured = meter.measured()
    if not measured.prompt_tokens:
        raise TraceError(f"{opened.report.source} holds {len(measured.lengths)} requests without a single prompt token")
    return measured


def _templates(opened: Log, corpus: Corpus, size: int) -> list[RecoveredTemplate]:
    if opened.encoder is None or not opened.has_text:
        return []
    return recover_templates(corpus.requests[:SEARCH_REQUESTS], opened.encoder, size)


def _read_summary(opened: Log) -> ReadSummary:
    report = opened.report
    return ReadSummary(
        report.source, report.format, report.lines, report.bad_lines, report.other_lines,
        tuple(report.bad_examples), tuple(report.bad_files), dict(report.warnings),
    )  # fmt: skip


def _seconds(measured: Measured) -> float | None:
    times = measured.timestamps
    return float(times.max() - times.min()) if len(times) and np.isfinite(times).all() else None


def _over_time(measured: Measured) -> tuple[tuple[float, float, float], ...]:
    """Reuse in equal windows of time, or of requests where the log has no times."""
    times = measured.timestamps
    if not len(times):
        return ()
    if not np.isfinite(times).all():
        times = np.arange(len(times), dtype=np.float64)
    start, span = float(times.min()), max(float(times.max() - times.min()), 1e-9)
    window = np.minimum(((times - start) / span * TIME_WINDOWS).astype(np.int64), TIME_WINDOWS - 1)
    tokens = np.bincount(window, weights=measured.lengths, minlength=TIME_WINDOWS)
    hits = np.bincount(window, weights=measured.hit_tokens, minlength=TIME_WINDOWS)
    return tuple(
        (
            index * span / TIME_WINDOWS,
            float(tokens[index]),
            float(hits[index] / tokens[index]) if tokens[index] else 0.0,
        )
        for index in range(TIME_WINDOWS)
    )


def _shared_prefixes(measured: Measured, corpus: Corpus, opened: Log) -> tuple[SharedPrefix, ...]:
    size, encoder, reader = measured.trace.block_size, opened.encoder, opened.reader

    def text_of(node: PrefixNode) -> str:
        if encoder is None or node.sample >= len(corpus.requests):
            return f"blocks {node.start} to {node.end - 1} of request {node.sample + 1}"
        tokens = encoder.encode([corpus.requests[node.sample]])[0][node.start * size : node.end * size]
        if reader is None:
            return " ".join(map(str, tokens[:SHOWN_IDS].tolist()))
        return reader.decode(tokens[:SHOWN_PREFIX_CHARS])[:SHOWN_PREFIX_CHARS]

    def shared(node: PrefixNode) -> SharedPrefix:
        return SharedPrefix(
            node.start * size, node.end * size, node.requests, node.tokens_saved, text_of(node),
            tuple(shared(child) for child in node.children),
        )  # fmt: skip

    return tuple(shared(node) for node in prefix_tree(measured.trace))
