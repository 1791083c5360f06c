"""The gateway's own Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCY_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5)
_FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """One registry a gateway, so that several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered, by status.", "status")
        self.decisions = self._counter("decisions", "Routing decisions, by policy and reason.", "policy", "reason")
        self.retries = self._counter("retries", "Requests sent to another worker, by the one that failed.", "worker")
        self.broken = self._counter("broken_streams", "Streams ended by an error event, by worker.", "worker")
        self.client_gone = self._counter("client_disconnects", "Requests whose client left before the end.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, as workers report them.", "worker")
        self.predicted = self._counter("predicted_cached_tokens", "Cached tokens expected when routing.", "worker")
        self.reported = self._counter("reported_cached_tokens", "Cached tokens that workers reported.", "worker")
        self.index_drops = self._counter(
            "index_drops", "Times a worker's index was dropped, by cause.", "worker", "cause"
        )
        self.rules = self._counter("prompt_rules", "Requests that a prompt rule changed.", "rule")
        self.rejected = self._counter(
            "rejected", "Requests refused by the gateway, by tenant and status.", "tenant", "status"
        )
        self.decision_seconds = self._histogram("decision_seconds", "Time of one routing decision.", _LATENCY_BUCKETS)
        self.added_seconds = self._histogram(
            "added_seconds",
            "From a request's last byte read to its first byte sent on, queueing apart.",
            _LATENCY_BUCKETS,
        )
        self.queue_seconds = self._histogram("queue_seconds", "Time spent in the gateway's queue.", _FIRST_BYTE_BUCKETS)
        self.first_byte_seconds = self._histogram(
            "time_to_first_byte_seconds", "From a request's last byte read to its answer's first.", _FIRST_BYTE_BUCKETS
        )
        self.up = Gauge(
            "caudex_gateway_worker_up", "1 if the worker gets requests.", ["worker"], registry=self.registry
        )
        self.in_flight = Gauge(
            "caudex_gateway_worker_in_flight", "Requests out at the worker.", ["worker"], registry=self.registry
        )
        self.waiting = Gauge("caudex_gateway_queue_length", "Requests in the queue.", registry=self.registry)
        self.index_bytes = Gauge("caudex_gateway_index_bytes", "Memory of the prefix index.", registry=self.registry)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"caudex_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"caudex_gateway_{name}", text, buckets=buckets, registry=self.registry)
