"""`caudex simulate`: a fleet in virtual time, policy beside policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caudex.routing import POLICIES

if TYPE_CHECKING:
    from caudex.simulate import CostModel, FleetChange, SimulationResult, SimulationSettings, Workload

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
@click.option("--fit", metavar="URL|FILE", help="Time from steps measured on this server, or in this file.")
@click.option("--save-fit", type=click.Path(dir_okay=False, path_type=Path), help="Keeps what --fit URL measured.")
@click.option("--capacity", type=click.IntRange(1), help="KV capacity of a replica in tokens; what fits, by default.")
@click.option("--eviction", default="lru", show_default=True, help="Eviction policy of the replicas' caches.")
@click.option("--max-num-seqs", default=256, show_default=True, type=click.IntRange(1))
@click.option("--max-num-batched-tokens", default=8_192, show_default=True, type=click.IntRange(1))
@click.option("--tokenizer", help="Of a log of text: a folder, hub id, tiktoken name, or `bytes` (the default).")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Where the trace has none.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many requests.")
@click.option("--speed", type=click.FloatRange(0, min_open=True), help="Arrivals so many times as fast.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Poisson arrivals, so many a second.")
@click.option("--kill", multiple=True, metavar="SECONDS:REPLICA", help="A replica dies; may be given many times.")
@click.option("--join", multiple=True, metavar="SECONDS:REPLICA", help="A replica joins; may be given many times.")
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
    from caudex.simulate import Slo, read_workload
    from caudex.trace.errors import TraceError

    try:
        names = _policy_names(policies)
        workload = read_workload(
            trace, tokenizer=options["tokenizer"], block_size=options["block_size"], limit=options["limit"]
        )
        if options["rate"] is not None:
            workload = workload.open_loop(options["rate"], options["seed"])
        elif options["speed"] is not None:
            workload = workload.faster(options["speed"])
        cost, capacity = _cost_and_capacity(options)
        slo = Slo(options["slo_ttft"], options["slo_tpot"])
        results: list[SimulationResult] = []
        if options["sequential"]:
            figures = _sequential(workload, names, capacity, options)
        else:
            results = _timed(workload, names, cost, capacity, options)
            figures = [result.summary(slo) for result in results]
    except (TraceError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    _print_table(figures, sequential=options["sequential"])
    if json_path is not None:
        report = {"version": 1, "trace": trace.name, "capacity_tokens": capacity, "policies": figures}
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if html_path is not None and results:
        html_path.write_text(simulation_page(trace.name, results, slo), encoding="utf-8")


def _policy_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES or name == "prefix_exact":
            simulated = sorted(set(POLICIES) - {"prefix_exact"})
            raise ValueError(f"cannot simulate policy {name!r}; choose from {', '.join(simulated)}")
    return names


def _cost_and_capacity(options: dict[str, Any]) -> tuple[CostModel, int]:
    from caudex.simulate import RooflineModel, find_gpu, find_model, fit_steps

    roofline = RooflineModel(find_model(options["model"]), find_gpu(options["gpu"]), options["gpus_per_replica"])
    capacity = options["capacity"] or roofline.kv_capacity_tokens()
    if options["fit"] is None:
        return roofline, capacity
    steps = _measured_steps(options["fit"])
    if options["save_fit"] is not None:
        options["save_fit"].write_bytes(steps)
    return fit_steps(steps), capacity


def _measured_steps(source: str) -> bytes:
    """Measured steps as JSON: of a server, or from a file."""
    if not source.startswith(("http://", "https://")):
        try:
            return Path(source).read_bytes()
        except OSError as error:
            raise ValueError(f"{source}: {error.strerror}") from error
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from caudex.bench.client import Endpoint, ServerError, first_model
    from caudex.bench.steps import measure_steps

    async def run() -> list[dict[str, Any]]:
        model = await first_model(Endpoint(source, ""))
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(f"measuring {source}")
            return await measure_steps(
                Endpoint(source, model), lambda done, total: progress.update(task, completed=done, total=total)
            )

    try:
        return json.dumps(asyncio.run(run()), indent=1).encode()
    except (ServerError, OSError) as error:
        raise ValueError(f"{source} could not be measured: {error}") from error


def _settings(workload: Workload, name: str, capacity: int, options: dict[str, Any]) -> SimulationSettings:
    from caudex.simulate import ReplicaLimits, SimulationSettings

    limits = ReplicaLimits(
        num_blocks=max(1, capacity // workload.block_size),
        block_size=workload.block_size,
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        eviction=options["eviction"],
    )
    changes = [*_changes(options["kill"], "kill"), *_changes(options["join"], "join")]
    return SimulationSettings(options["replicas"], limits, name, seed=options["seed"], changes=changes)


def _changes(texts: tuple[str, ...], kind: Any) -> list[FleetChange]:
    from caudex.simulate import FleetChange

    changes = []
    for text in texts:
        seconds, _, replica = text.partition(":")
        try:
            changes.append(FleetChange(float(seconds), kind, int(replica)))
        except ValueError:
            raise ValueError(f"--{kind} {text!r} does not look like SECONDS:REPLICA, for example 600:3") from None
    return changes


def _timed(
    workload: Workload, names: list[str], cost: CostModel, capacity: int, options: dict[str, Any]
) -> list[SimulationResult]:
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

    from caudex.simulate import FleetSimulation

    results = []
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for name in names:
            task = progress.add_task(name, total=len(workload))
            simulation = FleetSimulation(workload, _settings(workload, name, capacity, options), cost)
            results.append(simulation.run(lambda done, total, task=task: progress.update(task, completed=done)))  # type: ignore[misc]
    return results


def _sequential(workload: Workload, names: list[str], capacity: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    from caudex.routing import make_policy
    from caudex.simulate import replay_sequentially

    blocks = max(1, capacity // workload.block_size)
    figures = []
    for name in names:
        policy = make_policy(name, seed=options["seed"])
        result = replay_sequentially(
            workload, policy, num_replicas=options["replicas"], num_blocks=blocks, eviction=options["eviction"]
        )
        figures.append({"policy": name, "hit_rate": result.hit_rate, "imbalance": result.imbalance})
    return figures


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
        cells = [row["policy"], f"{row['hit_rate']:.1%}", f"{row['imbalance']:.2f}"]
        if not sequential:
            cells += [f"{row['ttft'][name]:.2f}" for name in ("p50", "p90", "p99")]
            cells += [f"{row['tpot'][name] * 1e3:.1f}" for name in ("p50", "p99")]
            cells += [f"{row['slo_share']:.1%}", f"{row['goodput_requests_per_second']:.2f}"]
            cells.append(f"{row['recomputed_tokens'] / 1e6:.1f}M")
        table.add_row(*cells)
    Console(width=None if Console().is_terminal else 140).print(table)
    refused = max((row.get("refused", 0) for row in figures), default=0)
    if refused:
        click.echo(f"{refused} requests were refused: they do not fit a replica, or none was left", err=True)
