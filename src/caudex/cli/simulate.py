"""`caudex simulate`: a fleet in virtual time, policy beside policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caudex.routing import POLICIES

if TYPE_CHECKING:
    from caudex.simulate import (
        CostModel,
        CostModelFile,
        FleetChange,
        ReplicaLimits,
        SimulationResult,
        SimulationSettings,
        Slo,
        Workload,
    )

MOST_FIT_ERROR = 0.1
"""Median error of a fit beyond which the measurements deserve little trust."""

DEFAULT_POLICIES = "round_robin,session,consistent_hash,prefix,cost"


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--replicas", default=4, show_default=True, type=click.IntRange(1, 100_000))
@click.option("--policy", "policies", default=DEFAULT_POLICIES, show_default=True, help="One or more, with commas.")
@click.option(
    "--model", default="Llama-3.1-8B", show_default=True, help="A known model, or a directory with config.json."
)
@click.option("--gpu", default="H100", show_default=True)
@click.option("--gpus-per-replica", default=1, show_default=True, type=click.IntRange(1))
@click.option("--fit", metavar="URL|FILE", help="Time as fitted to this live server, or as kept in this file.")
@click.option("--save-fit", type=click.Path(dir_okay=False, path_type=Path), help="Keeps what --fit URL found.")
@click.option("--capacity", type=click.IntRange(1), help="KV capacity of a replica in tokens.  [default: what fits]")
@click.option("--eviction", help="Eviction policy of the replicas' caches.  [default: gittins, as the cache's own]")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Requests that a replica runs at once.  [default: 256]")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Tokens in a step.  [default: 8192]")
@click.option("--tokenizer", help="Of a log of text: a folder, hub id, tiktoken name, or `bytes` (the default).")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Where the trace has none.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many requests.")
@click.option("--speed", type=click.FloatRange(0, min_open=True), help="Arrivals so many times as fast.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Poisson arrivals, so many a second.")
@click.option("--kill", multiple=True, metavar="SECONDS:REPLICA", help="A replica dies; may be given many times.")
@click.option("--join", multiple=True, metavar="SECONDS:REPLICA", help="A replica joins; may be given many times.")
@click.option(
    "--window",
    default=300.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Seconds before and after each death that are compared.",
)
@click.option("--slo-ttft", default=2.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--slo-tpot", default=0.1, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--sequential", is_flag=True, help="Hit rates alone: each request finished before the next.")
@click.option("--seed", default=0, show_default=True, type=int)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also writes all figures here."
)
@click.option("--html", "html_path", type=click.Path(dir_okay=False, path_type=Path), help="A page with plots.")
def command(trace: Path, policies: str, json_path: Path | None, html_path: Path | None, **options: Any) -> None:
    """Replay a request log or hash TRACE over a fleet of replicas and compare routing policies.

    Every replica runs the real cache at its real capacity; time comes from a roofline of --model on --gpu, or from
    measured steps (--fit).
    """
    from caudex.report.simulation import simulation_page
    from caudex.simulate import Slo
    from caudex.trace.errors import TraceError

    slo, window = Slo(options["slo_ttft"], options["slo_tpot"]), options["window"]
    results: list[SimulationResult] = []
    try:
        names = _policy_names(policies)
        workload = _workload(trace, options)
        cost, limits = _cost_and_limits(workload, options)
        settings = [_settings(name, limits, options) for name in names]
        if options["sequential"]:
            figures = [_sequential(workload, setting) for setting in settings]
        else:
            results = _timed(workload, settings, cost)
            deaths = _changes(options["kill"], "kill")
            figures = [_figures(result, deaths, window, slo) for result in results]
    except (TraceError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    _print_table(figures, sequential=options["sequential"])
    _print_deaths(figures, window)
    if json_path is not None:
        capacity = limits.num_blocks * limits.block_size
        report = {"version": 1, "trace": trace.name, "capacity_tokens": capacity, "policies": figures}
        json_path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    if html_path is not None and results:
        html_path.write_text(simulation_page(trace.name, results, slo, deaths, window), encoding="utf-8")
    if len(figures) < len(names) or any(row.get("unfinished") for row in figures):
        click.echo("interrupted: this is what was simulated until then", err=True)
        raise SystemExit(130)


def _workload(trace: Path, options: dict[str, Any]) -> Workload:
    from caudex.cli.reading import reading_progress
    from caudex.simulate import read_workload

    with reading_progress(f"reading {trace.name}") as (progress, _):
        workload = read_workload(
            trace,
            tokenizer=options["tokenizer"],
            block_size=options["block_size"],
            limit=options["limit"],
            progress=progress,
        )
    if options["rate"] is not None and options["speed"] is not None:
        raise ValueError("--rate and --speed both say when requests arrive; give one of them")
    if options["rate"] is not None:
        return workload.open_loop(options["rate"], options["seed"])
    return workload if options["speed"] is None else workload.faster(options["speed"])


def _policy_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES or name == "prefix_exact":
            simulated = sorted(set(POLICIES) - {"prefix_exact"})
            raise ValueError(f"cannot simulate policy {name!r}; choose from {', '.join(simulated)}")
    return names


def _cost_and_limits(workload: Workload, options: dict[str, Any]) -> tuple[CostModel, ReplicaLimits]:
    """What steps take and what a replica holds: of a model on a GPU, or of the server that was measured. An option
    goes before what the server tells."""
    from caudex.simulate import DEFAULT_EVICTION, ReplicaLimits, RooflineModel, find_gpu, find_model

    cost: CostModel
    if options["fit"] is not None:
        fitted = _fitted(options)
        cost, capacity = fitted.model, options["capacity"] or fitted.capacity_tokens
        told = fitted.max_num_seqs, fitted.max_num_batched_tokens
        if capacity is None:
            raise ValueError("the server did not tell how many tokens its KV cache holds; say so with --capacity")
    else:
        roofline = RooflineModel(find_model(options["model"]), find_gpu(options["gpu"]), options["gpus_per_replica"])
        cost, capacity, told = roofline, options["capacity"] or roofline.kv_capacity_tokens(), (None, None)
    if capacity < workload.block_size:
        raise ValueError(f"a capacity of {capacity} tokens is less than one block of the trace ({workload.block_size})")
    return cost, ReplicaLimits(
        num_blocks=capacity // workload.block_size,
        block_size=workload.block_size,
        max_num_seqs=options["max_num_seqs"] or told[0] or 256,
        max_num_batched_tokens=options["max_num_batched_tokens"] or told[1] or 8_192,
        eviction=options["eviction"] or DEFAULT_EVICTION,
    )


def _fitted(options: dict[str, Any]) -> CostModelFile:
    """The cost model of a file, or of a live server, which is kept if asked for."""
    from caudex.simulate import read_cost_model

    source = options["fit"]
    if source.startswith(("http://", "https://")):
        fitted = _measured(source, options["max_num_batched_tokens"])
        if options["save_fit"] is not None:
            options["save_fit"].write_bytes(fitted.encode())
        return fitted
    try:
        return read_cost_model(Path(source).read_bytes())
    except OSError as error:
        raise ValueError(f"--fit {source}: {error.strerror}") from error


def _measured(url: str, chunk_tokens: int | None) -> CostModelFile:
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from caudex.bench.client import Endpoint, ServerError
    from caudex.bench.fit import measure_server

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"measuring {url}", total=1.0)
        measuring = measure_server(
            Endpoint(url, ""), chunk_tokens, lambda share: progress.update(task, completed=share)
        )
        try:
            fitted, fit = asyncio.run(measuring)
        except (ServerError, OSError) as error:
            raise ValueError(f"{url} could not be measured: {error}") from error
    click.echo(
        f"fitted to {len(fitted.measurements)} measurements of {url}: off by {fit.median_error:.1%} in the median, "
        f"{fit.worst_error:.1%} at worst",
        err=True,
    )
    if fit.median_error > MOST_FIT_ERROR:
        click.echo("that is much: measure while nothing else uses the server or its machine", err=True)
    return fitted


def _settings(name: str, limits: ReplicaLimits, options: dict[str, Any]) -> SimulationSettings:
    from caudex.simulate import SimulationSettings

    changes = [*_changes(options["kill"], "kill"), *_changes(options["join"], "join")]
    return SimulationSettings(options["replicas"], limits, name, seed=options["seed"], changes=changes)


def _changes(texts: tuple[str, ...], kind: Any) -> list[FleetChange]:
    from caudex.simulate import FleetChange

    changes = []
    for text in texts:
        seconds, _, replica = text.partition(":")
        try:
            when, number = float(seconds), int(replica)
        except ValueError:
            raise ValueError(f"--{kind} {text!r} does not look like SECONDS:REPLICA, for example 600:3") from None
        changes.append(FleetChange(when, kind, number))
    return changes


def _timed(workload: Workload, settings: list[SimulationSettings], cost: CostModel) -> list[SimulationResult]:
    """A result for each policy; interrupted, those up to then, the last one as far as it got."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from caudex.cli.progress import RateColumn
    from caudex.simulate import FleetSimulation

    results: list[SimulationResult] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for setting in settings:
            task = progress.add_task(setting.policy, total=len(workload))
            simulation = FleetSimulation(workload, setting, cost)
            try:
                results.append(simulation.run(lambda done, _, task=task: progress.update(task, completed=done)))  # type: ignore[misc]
            except KeyboardInterrupt:
                return [*results, simulation.result()]
    return results


def _figures(result: SimulationResult, deaths: list[FleetChange], window: float, slo: Slo) -> dict[str, Any]:
    around = [
        {"time": death.time, "replica": death.replica, **result.around(death.time, window, slo)} for death in deaths
    ]
    return {**result.summary(slo), "deaths": around}


def _sequential(workload: Workload, settings: SimulationSettings) -> dict[str, Any]:
    from caudex.routing import make_policy
    from caudex.simulate import replay_sequentially

    result = replay_sequentially(
        workload,
        make_policy(settings.policy, seed=settings.seed),
        num_replicas=settings.num_replicas,
        num_blocks=settings.limits.num_blocks,
        eviction=settings.limits.eviction,
    )
    return {"policy": settings.policy, "hit_rate": result.hit_rate, "imbalance": result.imbalance}


def _print_table(figures: list[dict[str, Any]], *, sequential: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("policy", no_wrap=True)
    headers = ["hit rate", "imbalance"]
    if not sequential:
        headers += ["TTFT p50 s", "p90", "p99", "TPOT p50 ms", "p99", "in SLO", "good req/s", "recomputed"]
    for header in headers:
        table.add_column(header, justify="right")
    for row in figures:
        cells = [row["policy"], _number(row["hit_rate"], "{:.1%}"), _number(row["imbalance"], "{:.2f}")]
        if not sequential:
            cells += [_number(row["ttft"][name], "{:.2f}") for name in ("p50", "p90", "p99")]
            cells += [_number(row["tpot"][name], "{:.1f}", 1e3) for name in ("p50", "p99")]
            cells.append(_number(row["slo_share"], "{:.1%}"))
            cells.append(_number(row["goodput_requests_per_second"], "{:.2f}"))
            cells.append(f"{row['recomputed_tokens'] / 1e6:.1f}M")
        table.add_row(*cells)
    Console(width=None if Console().is_terminal else 140).print(table)
    refused = max((row.get("refused", 0) for row in figures), default=0)
    if refused:
        click.echo(f"{refused} requests were refused: they do not fit a replica, or none was left", err=True)


def _print_deaths(figures: list[dict[str, Any]], window: float) -> None:
    """What users saw before and after each death."""
    from rich.console import Console
    from rich.table import Table

    if not any(row.get("deaths") for row in figures):
        return
    table = Table(title=f"{window:g} s before -> after a death")
    table.add_column("policy", no_wrap=True)
    for header in ("dead", "hit rate", "TTFT mean s", "p90", "p99", "in SLO", "recomputed", "retried"):
        table.add_column(header, justify="right")
    for row in figures:
        for death in row["deaths"]:
            before, after = death["before"], death["after"]
            pairs = [
                (before["hit_rate"], after["hit_rate"], "{:.1%}"),
                *((before["ttft"][name], after["ttft"][name], "{:.2f}") for name in ("mean", "p90", "p99")),
                (before["slo_share"], after["slo_share"], "{:.1%}"),
                (before["recomputed_tokens"], after["recomputed_tokens"], "{:,.0f}"),
            ]
            cells = [f"{_number(was, form)} -> {_number(became, form)}" for was, became, form in pairs]
            dead = f"{death['replica']} at {death['time']:g} s"
            table.add_row(row["policy"], dead, *cells, str(before["retried"] + after["retried"]))
    Console(width=None if Console().is_terminal else 140).print(table)


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
