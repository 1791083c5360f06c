"""A worker's own figures, from its Prometheus page, under the names of vLLM, SGLang, llama.cpp and Caudex."""

from __future__ import annotations

import re
from dataclasses import dataclass

from caudex.routing import LoadReport

_RUNNING = (
    "vllm:num_requests_running",
    "caudex:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
)
_WAITING = (
    "vllm:num_requests_waiting",
    "caudex:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
)
_KV_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "caudex:kv_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_CAPACITY = ("sglang:max_total_num_tokens", "caudex:kv_cache_capacity_tokens")
_CACHE_CONFIG = ("vllm:cache_config_info", "caudex:cache_config_info")
_STARTED = "process_start_time_seconds"
_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(\{.*\})?\s+([^\s]+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    load: LoadReport
    started_at: float | None


def parse_worker_metrics(page: str) -> WorkerFigures:
    """Reads what is there; what is not is None. Samples of one name (one an engine, or a rank) are added up, usage
    is their mean. Names are also found with underscores for colons, as some exporters rewrite them."""
    samples: dict[str, list[float]] = {}
    labels: dict[str, str] = {}
    for name, label_text, value in _SAMPLE.findall(page):
        try:
            samples.setdefault(name, []).append(float(value))
        except ValueError:
            continue
        if name.replace("caudex_", "caudex:") in _CACHE_CONFIG:
            labels.update(_LABEL.findall(label_text))
    usage = _first(samples, _KV_USAGE)
    load = LoadReport(
        running=_sum(_first(samples, _RUNNING)),
        waiting=_sum(_first(samples, _WAITING)),
        kv_usage=None if usage is None else sum(usage) / len(usage),
        capacity_tokens=_sum(_first(samples, _CAPACITY)) or _configured_capacity(labels),
    )
    return WorkerFigures(load, _started_at(samples))


def _first(samples: dict[str, list[float]], names: tuple[str, ...]) -> list[float] | None:
    for name in names:
        found = samples.get(name) or samples.get(name.replace(":", "_"))
        if found:
            return found
    return None


def _started_at(samples: dict[str, list[float]]) -> float | None:
    """When the process began; where it does not say so, when the first of its metrics was created."""
    if _STARTED in samples:
        return samples[_STARTED][0]
    return min((min(values) for name, values in samples.items() if name.endswith("_created")), default=None)


def _sum(values: list[float] | None) -> float | None:
    return None if values is None else sum(values)


def _configured_capacity(labels: dict[str, str]) -> float | None:
    try:
        blocks = labels.get("num_gpu_blocks") or labels["num_blocks"]
        return float(blocks) * float(labels["block_size"])
    except (KeyError, ValueError):
        return None
