"""The simulator against two real servers on this machine: the same requests at the same times, cost by cost.

Started by `python benchmarks/simulation.py LOG --validate`. LOG is a request log with chat messages (tau_airline of
tau-bench, for one). Two `caudex serve`, each pinned to one core and one thread, get the log's requests as a Poisson
process, first straight from the client in turn, then through `caudex route`; before that a cost model is fitted to them
as `caudex simulate --fit` does it, on prompts that have nothing to do with the log. Then the simulator gets the same
requests, at the times at which they were sent, with the same policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from caudex.bench.client import Endpoint, Record, connect, first_model, measure, read_head, request_bytes
from caudex.bench.fit import measure_server
from caudex.bench.local import caudex_command, free_port, running
from caudex.engine.loading import locate_checkpoint
from caudex.simulate import (
    CostModelFile,
    FleetSimulation,
    ReplicaLimits,
    SimulationSettings,
    Workload,
    fit_model,
    read_cost_model,
    read_workload,
)

NUM_BLOCKS = 4_096
MAX_MODEL_LEN = 4_096
OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """Requests at `rate` a second for `seconds`; `policy` None sends them to the servers in turn, without a gateway."""

    rate: float
    seconds: float
    policy: str | None

    @property
    def label(self) -> str:
        return f"{'client, in turn' if self.policy is None else f'gateway, {self.policy}'}, {self.rate:g}/s"


TIMES = ("mean", "p50", "p90", "p99")


def figures(ttft: Any, latency: Any, cached: Any, prompts: Any, seconds: float) -> dict[str, float]:
    """Of columns by request; `latency` is to the last token. In seconds, as is the run's duration."""
    ttft, latency = np.asarray(ttft), np.asarray(latency)
    tpot = (latency - ttft) / (OUTPUT_TOKENS - 1)
    times = {
        f"{name} {statistic}": value
        for name, column in (("TTFT", ttft), ("TPOT", tpot))
        for statistic, value in zip(TIMES, _statistics(column), strict=True)
    }
    throughput = len(ttft) * OUTPUT_TOKENS / seconds
    return {**times, "output tokens/s": throughput, "hit rate": float(np.sum(cached) / np.sum(prompts))}


def _statistics(column: NDArray[np.float64]) -> list[float]:
    """In the order of TIMES."""
    return [float(column.mean()), *np.percentile(column, [50, 90, 99]).tolist()]


def validate(log: Path, runs: Sequence[Run], fit_path: Path | None) -> list[dict[str, Any]]:
    """Plays and simulates all runs; the figures of both."""
    rows = _read(log, 3 * max(int(run.rate * run.seconds) for run in runs))
    lengths = _workload(rows).input_lengths
    rows = [row for row, length in zip(rows, lengths, strict=True) if length + OUTPUT_TOKENS <= MAX_MODEL_LEN]
    workload = _workload(rows)
    bodies = [{"messages": row["messages"], "user": row["session_id"]} for row in rows]
    cost = None if fit_path is None or not fit_path.exists() else read_cost_model(fit_path.read_bytes())
    reports = []
    with _servers(2) as urls:
        if cost is None:
            cost = asyncio.run(_fit(urls))
            if fit_path is not None:
                fit_path.write_bytes(cost.encode())
        for run in runs:
            asyncio.run(_forget(urls))
            with _front(urls, run) as targets:
                sent, records = asyncio.run(_play(targets, bodies[: int(run.rate * run.seconds)], run))
            reports.append(_compare(run, sent, records, workload, cost))
    return reports


def _read(log: Path, limit: int) -> list[dict[str, Any]]:
    """The log's first requests without their tools, for which the model's chat template has no place."""
    with gzip.open(log, "rt") if log.suffix == ".gz" else log.open() as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, limit)]
    return [{name: row[name] for name in ("session_id", "timestamp", "messages")} for row in rows]


def _workload(rows: list[dict[str, Any]]) -> Workload:
    """The requests as the servers see them, to the token."""
    tokenizer = str(locate_checkpoint(None).directory)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "excerpt.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        workload = read_workload(path, tokenizer=tokenizer, block_size=1)
    return replace(workload, output_lengths=np.full(len(workload), OUTPUT_TOKENS))


@contextlib.contextmanager
def _servers(count: int) -> Iterator[list[str]]:
    """Servers of one thread, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    limits = ["--num-threads", "1", "--num-blocks", str(NUM_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN)]
    with contextlib.ExitStack() as stack:
        urls = []
        for i in range(count):
            port = free_port()
            command = [*_pinned(cores[i % len(cores)]), *caudex_command(limits, port)]
            urls.append(stack.enter_context(running(command, port, environment={"OMP_NUM_THREADS": "1"})).url)
        yield urls


def _pinned(core: int) -> list[str]:
    taskset = shutil.which("taskset")
    return [taskset, "-c", str(core)] if taskset else []


@contextlib.contextmanager
def _front(urls: list[str], run: Run) -> Iterator[list[str]]:
    """Where the client sends to: the servers, or a gateway before them."""
    if run.policy is None:
        yield urls
        return
    port = free_port()
    workers = [option for url in urls for option in ("--worker", url)]
    tokenizer = ["--tokenizer", str(locate_checkpoint(None).directory)]
    command = [sys.executable, "-m", "caudex.cli", "route", "--port", str(port), "--log-level", "warning"]
    with running([*command, *workers, *tokenizer, "--policy", run.policy], port) as gateway:
        yield [gateway.url]


async def _fit(urls: list[str]) -> CostModelFile:
    """One model of all servers, each measured while the others are, since they share the machine's memory."""
    found = await asyncio.gather(*(measure_server(Endpoint(url, ""), None, lambda _: None) for url in urls))
    measurements = [measurement for file, _ in found for measurement in file.measurements]
    fit = fit_model(measurements)
    print(f"fit: off by {fit.median_error:.1%} in the median, {fit.worst_error:.1%} at worst", file=sys.stderr)
    return msgspec.structs.replace(found[0][0], model=fit.model, measurements=measurements)


async def _forget(urls: list[str]) -> None:
    """Empties the servers' caches."""
    for url in urls:
        reader, writer = await connect(Endpoint(url, ""))
        writer.write(request_bytes(Endpoint(url, ""), "POST", "/reset_prefix_cache", b""))
        await read_head(reader)
        writer.close()


async def _play(targets: list[str], bodies: list[dict[str, Any]], run: Run) -> tuple[list[float], list[Record]]:
    """Sends the requests as a Poisson process; when each was sent, and what it took."""
    model = await first_model(Endpoint(targets[0], ""))
    gaps = np.random.default_rng(1).exponential(1.0 / run.rate, len(bodies))
    due = (np.cumsum(gaps) - gaps[0]).tolist()
    sent = [0.0] * len(bodies)
    began = time.perf_counter()

    async def ask(i: int) -> Record:
        await asyncio.sleep(max(0.0, due[i] - (time.perf_counter() - began)))
        sent[i] = time.perf_counter() - began
        fixed = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
        endpoint = Endpoint(targets[i % len(targets)], model)
        record, _ = await measure(endpoint, "/v1/chat/completions", bodies[i] | fixed, first=True)
        return record

    return sent, list(await asyncio.gather(*(ask(i) for i in range(len(bodies)))))


def _compare(
    run: Run, sent: list[float], records: list[Record], workload: Workload, cost: CostModelFile
) -> dict[str, Any]:
    errors = [record.error for record in records if record.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests failed: {errors[0]}")
    prompts = [record.prompt_tokens or 0 for record in records]
    if prompts != workload.input_lengths[: len(prompts)].tolist():
        raise RuntimeError("the servers count other tokens in the prompts than the simulator does")
    seconds = max(at + record.total for at, record in zip(sent, records, strict=True))
    cached = [record.cached_tokens or 0 for record in records]
    real = figures([r.ttft for r in records], [r.total for r in records], cached, prompts, seconds)
    return {
        **asdict(run),
        "label": run.label,
        "requests": len(records),
        "real": real,
        "simulated": _simulated(run, sent, workload, cost),
        "records": [
            {"sent": at, "ttft": r.ttft, "total": r.total, "prompt": r.prompt_tokens, "cached": r.cached_tokens}
            for at, r in zip(sent, records, strict=True)
        ],
    }


def _simulated(run: Run, sent: list[float], workload: Workload, cost: CostModelFile) -> dict[str, float]:
    order = np.argsort(sent, kind="stable")
    if order.tolist() != list(range(len(sent))):
        raise RuntimeError("the client sent requests out of order")
    count = len(sent)
    part = replace(
        workload,
        ids=workload.ids[: workload.offsets[count]],
        offsets=workload.offsets[: count + 1],
        arrivals=np.array(sent) - sent[0],
        input_lengths=workload.input_lengths[:count],
        output_lengths=workload.output_lengths[:count],
        sessions=workload.sessions[:count],
    )
    limits = ReplicaLimits(
        cost.capacity_tokens or NUM_BLOCKS * 16, 1, cost.max_num_seqs or 32, cost.max_num_batched_tokens or 512
    )
    settings = SimulationSettings(2, limits, run.policy or "round_robin")
    result = FleetSimulation(part, settings, cost.model).run()
    latency = result.finishes - result.arrivals
    seconds = float(result.finishes.max())
    return figures(result.ttft, latency, result.cached_tokens, result.input_lengths, seconds)


def print_reports(reports: list[dict[str, Any]]) -> None:
    """A row a figure, a column a run."""
    table = Table(title="real | simulated (difference)")
    table.add_column("")
    for report in reports:
        table.add_column(report["label"], justify="right")
    for name in reports[0]["real"]:
        pairs = [(report["real"][name], report["simulated"][name]) for report in reports]
        table.add_row(
            name, *(f"{real:.3f} | {simulated:.3f} ({simulated / real - 1:+.1%})" for real, simulated in pairs)
        )
    Console(width=220).print(table)
