"""What Prometheus reads. Names and meanings are vLLM's, behind a prefix of our own.

A dashboard, an alert or a router written for vLLM works on Caudex once the prefix is changed, here
(`--metrics-prefix vllm`) or there; with both behind one Prometheus, a different prefix keeps their series apart.

Counters and gauges of the engine are read from it when Prometheus asks, so they are its own figures, exact, and cost
the serving path nothing. Only the latency histograms are fed as outputs pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from caudex.engine.types import EngineStats, FinishReason, GenerationRequest, RequestOutput

if TYPE_CHECKING:
    from caudex.engine.engine import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST

TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
TIER_OUTCOMES = {
    "hit": "hits", "miss": "misses", "corrupt": "corrupt", "skipped": "skipped", "written": "written",
    "dropped": "dropped",
}  # fmt: skip
TIER_BYTES = {"read": "read_bytes", "written": "written_bytes"}
TIER_SECONDS = {"read": "read_seconds", "written": "write_seconds"}
TIER_ERRORS = {"read": "read_errors", "written": "write_errors"}

LENGTH_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


class Metrics:
    """One server's metrics, in a registry of their own, so that several servers can live in one process."""

    def __init__(self, engine: Engine, model_name: str, prefix: str = "caudex") -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(EngineCollector(engine, model_name, prefix))
        self._model = model_name

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            full = f"{prefix}:{name}"
            made = Histogram(full, text, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self.ttft = histogram("time_to_first_token_seconds", "Seconds from request to its first token.", TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Seconds between two tokens of a request.", TOKEN_BUCKETS)
        self.latency = histogram(
            "e2e_request_latency_seconds", "Seconds from request to its last token.", LATENCY_BUCKETS
        )
        self.prompt_length = histogram("request_prompt_tokens", "Tokens in a request's prompt.", LENGTH_BUCKETS)
        self.cached_length = histogram(
            "request_cached_tokens", "Prompt tokens of a request served from the cache.", (0, *LENGTH_BUCKETS)
        )
        self.output_length = histogram("request_generation_tokens", "Tokens generated for a request.", LENGTH_BUCKETS)
        self._http = Counter(
            f"{prefix}:http_requests", "HTTP requests answered.", ["path", "status"], registry=self.registry
        )

    def timer(self, requests: Sequence[GenerationRequest], started_at: float) -> RequestTimer:
        return RequestTimer(self, len(requests), started_at)

    def count_http(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def exposition(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)


class RequestTimer:
    """Times the outputs of one HTTP request's choices, each from the request's arrival at the engine."""

    def __init__(self, metrics: Metrics, num_choices: int, started_at: float) -> None:
        self._metrics = metrics
        self._started_at = started_at
        self._previous: list[float | None] = [None] * num_choices

    def observe(self, choice: int, output: RequestOutput, made_at: float) -> None:
        """Take note of a choice's next output, which the engine made at `made_at` (`time.perf_counter`)."""
        metrics = self._metrics
        if output.token_ids:
            self._observe_tokens(choice, output, made_at)
        if output.finish_reason in ("stop", "length"):
            metrics.latency.observe(made_at - self._started_at)
            metrics.output_length.observe(output.num_output_tokens)

    def _observe_tokens(self, choice: int, output: RequestOutput, made_at: float) -> None:
        previous = self._previous[choice]
        self._previous[choice] = made_at
        if previous is not None:
            self._metrics.itl.observe(made_at - previous)
            return
        self._metrics.ttft.observe(made_at - self._started_at)
        self._metrics.prompt_length.observe(output.num_prompt_tokens)
        self._metrics.cached_length.observe(output.num_cached_tokens)


class EngineCollector(Collector):
    """Turns `engine.stats()` into metric families when Prometheus asks."""

    def __init__(self, engine: Engine, model_name: str, prefix: str) -> None:
        self._engine = engine
        self._label = model_name
        self._prefix = prefix

    def describe(self) -> list[Metric]:
        return []  # Keeps the registry from collecting at registration.

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._cache_config(stats)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_requests_running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be run.", stats.num_requests_waiting)
        usage = stats.num_pinned_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use by requests; 1 is all.", usage)
        blocks = GaugeMetricFamily(
            f"{self._prefix}:kv_cache_blocks",
            "KV blocks by state: pinned by a request, cached for a later one, or free.",
            labels=["model_name", "state"],
        )
        blocks.add_metric([self._label, "pinned"], stats.num_pinned_blocks)
        blocks.add_metric([self._label, "cached"], stats.num_cached_blocks)
        blocks.add_metric([self._label, "free"], stats.num_free_blocks)
        yield blocks

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_cache_hits)
        if stats.kv_tiers:
            yield from self._tiers(stats)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that were run.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens computed on a guess.", stats.draft_tokens)
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Tokens of a guess that came true.", stats.accepted_draft_tokens
        )
        yield self._counter("num_preemptions", "Requests put back in the queue for want of blocks.", stats.preemptions)
        finished = CounterMetricFamily(
            f"{self._prefix}:request_success",
            "Requests that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason in get_args(FinishReason):
            finished.add_metric([self._label, reason], stats.requests_finished.get(reason, 0))
        yield finished

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        """What the KV tiers did: together in tokens, by vLLM's names for an external cache, and each in blocks."""
        asked, given = stats.tier_queries, stats.tier_hits
        yield self._counter("external_prefix_cache_queries", "Prompt tokens asked of the KV tiers.", asked)
        yield self._counter("external_prefix_cache_hits", "Prompt tokens fetched from the KV tiers.", given)
        yield self._by_tier(stats, "kv_tier_blocks", "KV blocks, by what became of them.", "outcome", TIER_OUTCOMES)
        yield self._by_tier(stats, "kv_tier_bytes", "Bytes moved.", "direction", TIER_BYTES)
        yield self._by_tier(stats, "kv_tier_seconds", "Seconds spent moving them.", "direction", TIER_SECONDS)
        yield self._by_tier(stats, "kv_tier_errors", "Calls in which a store failed.", "direction", TIER_ERRORS)

    def _by_tier(self, stats: EngineStats, name: str, text: str, label: str, fields: Mapping[str, str]) -> Metric:
        """A counter of every tier, with a series for each of some fields of its stats."""
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name", "tier", label])
        for tier in stats.kv_tiers:
            for value, field in fields.items():
                family.add_metric([self._label, tier.name, value], getattr(tier, field))
        return family

    def _cache_config(self, stats: EngineStats) -> Metric:
        config = self._engine.config
        fields = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(stats.num_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "max_num_seqs": str(config.max_num_seqs),
            "max_num_batched_tokens": str(config.max_num_batched_tokens),
        }
        info = InfoMetricFamily(f"{self._prefix}:cache_config", "Settings of the KV cache.", labels=["model_name"])
        info.add_metric([self._label], fields)
        return info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._label], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._label], value)
        return family
