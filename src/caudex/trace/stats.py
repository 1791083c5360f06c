"""What a trace holds, in a few numbers: lengths, times, names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Counts over a whole trace; lengths are tokens, `seconds` the span of its times (None where it has none)."""

    requests: int
    prompt_tokens: int
    mean_length: float
    median_length: float
    p95_length: float
    max_length: int
    output_tokens: int
    seconds: float | None
    sessions: int
    tenants: int
    models: int
    namespaces: int


def trace_stats(batches: Iterable[Any]) -> TraceStats:
    """One pass over a trace's batches; keeps 8 bytes a request and the distinct names."""
    lengths: list[int] = []
    outputs = 0
    times: list[float] = []
    names: dict[str, set[object]] = {name: set() for name in ("session", "tenant", "model", "namespace")}
    for batch in batches:
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names[:-1]}
        lengths += columns["input_length"]
        outputs += sum(length or 0 for length in columns["output_length"])
        times += [time for time in columns["timestamp"] if time is not None]
        for name in ("session", "tenant", "model"):
            names[name].update(value for value in columns[name] if value is not None)
        names["namespace"].update(zip(columns["model"], columns["lora"], columns["salt"], strict=True))
    array = np.asarray(lengths or [0])
    return TraceStats(
        requests=len(lengths),
        prompt_tokens=int(array.sum()),
        mean_length=float(array.mean()),
        median_length=float(np.median(array)),
        p95_length=float(np.percentile(array, 95)),
        max_length=int(array.max()),
        output_tokens=outputs,
        seconds=max(times) - min(times) if times else None,
        sessions=len(names["session"]),
        tenants=len(names["tenant"]),
        models=len(names["model"]),
        namespaces=len(names["namespace"]),
    )
