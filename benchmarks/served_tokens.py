"""Where the time of served tokens goes: what each thread of server and client uses while a scene is played.

    python benchmarks/served_tokens.py [--scenes decode document] [--repeats 5] [-- SERVER OPTIONS]

Plays scenes of `caudex.bench` on a `caudex serve` of its own, with the settings of `serving.py`, and reads from the
system what every thread has used meanwhile: the engine's thread and the kernels' (`caudex-engine`, and workers without
a name of their own), the event loop's, and the client's. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from caudex.bench.client import Endpoint, Record, ServerError, first_model
from caudex.bench.local import free_port, running
from caudex.bench.player import Scale
from caudex.bench.run import Plan, play_scene, warm_up
from caudex.bench.scenes import SCENES
from caudex.bench.summary import Summary
from servers import Caudex, Setting

SCALE = Scale(answer_tokens=32)
LEAST_MILLISECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Use:
    """What a thread has used: milliseconds of processor time, and how often it let go of a processor or lost it."""

    name: str
    milliseconds: float
    let_go: int
    lost: int

    def since(self, before: Use | None) -> Use:
        if before is None:
            return self
        return Use(
            self.name,
            self.milliseconds - before.milliseconds,
            self.let_go - before.let_go,
            self.lost - before.lost,
        )


def thread_uses(pid: int) -> dict[int, Use]:
    """What every thread of a process has used so far, by id."""
    return {int(task.name): thread_use(task) for task in Path(f"/proc/{pid}/task").iterdir()}


def thread_use(task: Path) -> Use:
    status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
    return Use(
        status["Name"],
        int((task / "schedstat").read_text().split()[0]) / 1e6,
        int(status["voluntary_ctxt_switches"]),
        int(status["nonvoluntary_ctxt_switches"]),
    )


@dataclass(frozen=True, slots=True)
class Played:
    """A scene played once, with what the threads of the server and of the client used meanwhile."""

    summary: Summary
    server: list[Use]
    client: list[Use]


async def play_measured(url: str, pid: int, scene: str, seed: int) -> Played:
    endpoint = Endpoint(url, await first_model(Endpoint(url, "")))
    plan = Plan([SCENES[scene]], SCALE, cold_runs=False, seed=seed)
    await warm_up(endpoint, plan)
    before = thread_uses(pid), thread_uses(os.getpid())
    summary = await play_scene(endpoint, plan, SCENES[scene], False, report_error)
    after = thread_uses(pid), thread_uses(os.getpid())
    server, client = (used(*pair) for pair in zip(before, after, strict=True))
    return Played(summary, server, client)


def used(before: dict[int, Use], after: dict[int, Use]) -> list[Use]:
    """The threads that used anything worth a line, busiest first."""
    spent = [use.since(before.get(thread)) for thread, use in after.items()]
    return sorted((use for use in spent if use.milliseconds > LEAST_MILLISECONDS), key=lambda use: -use.milliseconds)


def report_error(scene: str, record: Record) -> None:
    if record.error is not None:
        raise ServerError(f"{scene}: {record.error}")


def show(played: Sequence[Played]) -> None:
    """Medians over the repeats, then the threads of the repeat whose wall time is the median's."""
    walls = [one.summary.wall for one in played]
    rates = [one.summary.output_tokens_per_second for one in played]
    firsts = [one.summary.ttft_p50 or 0.0 for one in played]
    gaps = [one.summary.inter_token_p50 or 0.0 for one in played]
    print(
        f"{played[0].summary.scene}: wall {statistics.median(walls):.3f} s ({min(walls):.3f}-{max(walls):.3f}), "
        f"{statistics.median(rates):.0f} tokens/s, first token {statistics.median(firsts) * 1e3:.0f} ms, "
        f"between tokens {statistics.median(gaps) * 1e3:.2f} ms"
    )
    typical = sorted(played, key=lambda one: one.summary.wall)[len(played) // 2]
    table = Table("process", "thread", "ms", "share of wall", "let go", "lost", box=box.SIMPLE_HEAD)
    for process, uses in (("server", typical.server), ("client", typical.client)):
        for use in uses:
            share = use.milliseconds / 1e3 / typical.summary.wall
            table.add_row(process, use.name, f"{use.milliseconds:.0f}", f"{share:.0%}", str(use.let_go), str(use.lost))
    Console().print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", nargs="+", default=["decode", "document"], choices=list(SCENES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("options", nargs="*", metavar="SERVER OPTION", help="after --: options of caudex serve")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    port, seed = free_port(), random.randrange(2**32)
    command = Caudex(options=arguments.options).command(Setting(), port)
    with running(command, port) as local:
        for scene in arguments.scenes:
            repeats = [
                asyncio.run(play_measured(local.url, local.process.pid, scene, seed + repeat))
                for repeat in range(arguments.repeats)
            ]
            show(repeats)
        peak = local.peak_memory()
    print(f"start-up {local.startup:.1f} s, peak memory {(peak or 0) / 2**20:.0f} MiB", file=sys.stderr)


if __name__ == "__main__":
    main()
