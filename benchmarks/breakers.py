"""Plants breakers of every kind in logs of several workloads and forms, and tells which are named, placed and mended.

    python benchmarks/breakers.py [--traces FOLDER] [--forms messages,prompts] [--names iso_clock_head,...] [--jobs 2]
                                  [--record FILE]

A breaker counts as found where the first finding has its kind, lies where requests part in the broken log, and brings
the clean log's own hit rate when mended. Prints a line for each that is not, and a table by workload and form; with
`--all` a line for each. With `--traces` (a folder with `text/tau_airline.openai.jsonl.gz` and
`text/lmcache_miniswe.plain.jsonl.gz`) real logs are broken too. Exit status 1 where anything was missed.

It takes about half an hour a form. `--record` writes a line of JSON as each trial ends, and leaves out those that the
file already holds: a run that was stopped goes on, and only what a change may have touched need be deleted from it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.analysis.plants import PLANTS, Body
from tests.analysis.plants.judge import LEAST_LOSS, faults
from tests.analysis.plants.logs import FORMS, analyzed, generated, has, parting_tokens

from caudex.analysis.results import Analysis
from caudex.trace.chain import Int64Array

REAL = {"tau_airline": "text/tau_airline.openai.jsonl.gz", "miniswe": "text/lmcache_miniswe.plain.jsonl.gz"}
GENERATED = {"agent": 120, "chat": 120, "rag": 120, "few-shot": 120, "chat+rag+agent": 150}
REQUESTS = 120
SKIPPED_REQUESTS = 1500
"""Of a real log: the mutants in circulation are made of its first requests."""


@dataclass(frozen=True)
class Trial:
    """One plant in one form of one log; without a plant, the clean log."""

    log: str
    form: str
    plant: str | None


@dataclass(frozen=True)
class Outcome:
    """What became of a trial; `faults` is None where the plant cost nothing, so that there was nothing to find."""

    trial: Trial
    faults: list[str] | None
    line: str


@cache
def log_named(name: str, traces: Path | None) -> list[Body]:
    if name in GENERATED:
        return generated(name, GENERATED[name], seed=29)
    assert traces is not None
    with gzip.open(traces / REAL[name]) as lines:
        bodies = [json.loads(line) for line in lines]
    first = SKIPPED_REQUESTS if len(bodies) > SKIPPED_REQUESTS + REQUESTS else 0
    sessions = {body["session_id"] for body in bodies[first : first + REQUESTS]}
    chosen = islice((body for body in bodies if body["session_id"] in sessions), REQUESTS)
    return [{key: value for key, value in body.items() if key != "output"} for body in chosen]


def analyzed_in(form: str, log: list[Body]) -> Analysis:
    with tempfile.TemporaryDirectory() as folder:
        return analyzed(FORMS[form](log), Path(folder) / "log.jsonl")


def parting_in(form: str, log: list[Body]) -> Int64Array:
    with tempfile.TemporaryDirectory() as folder:
        return parting_tokens(FORMS[form](log), Path(folder) / "log.jsonl")


@cache
def clean_analysis(name: str, form: str, traces: Path | None) -> Analysis:
    return analyzed_in(form, log_named(name, traces))


def outcome(trial: Trial, traces: Path | None) -> Outcome:
    log = log_named(trial.log, traces)
    clean = clean_analysis(trial.log, trial.form, traces)
    where = f"{trial.log:14s} {trial.form:9s} {trial.plant or 'clean':27s}"
    if trial.plant is None:
        alarms = [f"false alarm: {breaker.kind}" for breaker in clean.breakers]
        return Outcome(trial, alarms, f"{where} {clean.infinite_hit_rate:.3f}")
    plant = PLANTS[trial.plant]
    if plant.clean is not list:
        clean = analyzed_in(trial.form, plant.clean(log))
    broken = plant.mutate(log)
    found = analyzed_in(trial.form, broken)
    wanted = clean.infinite_hit_rate
    if wanted - found.infinite_hit_rate < LEAST_LOSS:
        return Outcome(trial, None, f"{where} {found.infinite_hit_rate:.3f} ----- {wanted:.3f} costs nothing")
    first = found.breakers[0] if found.breakers else None
    told = f"{first.hit_rate_if_mended:.3f} {wanted:.3f} {first.kind} at {first.where.description}" if first else "-"
    wrong = faults(plant, trial.form, wanted, found, parting_in(trial.form, broken))
    return Outcome(trial, wrong, f"{where} {found.infinite_hit_rate:.3f} {told}")


def trials(options: argparse.Namespace) -> Iterator[Trial]:
    logs = [*GENERATED, *(REAL if options.traces is not None else ())]
    for name in options.logs.split(",") if options.logs else logs:
        offers = has(log_named(name, options.traces))
        for form in options.forms.split(","):
            if not options.names:
                yield Trial(name, form, None)
            for plant in PLANTS.values():
                wanted = not options.names or plant.name in options.names.split(",")
                if wanted and plant.needs <= offers:
                    yield Trial(name, form, plant.name)


def recorded(path: Path | None) -> dict[Trial, Outcome]:
    if path is None or not path.exists():
        return {}
    rows = map(json.loads, path.read_text().splitlines())
    outcomes = (Outcome(Trial(**row["trial"]), row["faults"], row["line"]) for row in rows)
    return {outcome.trial: outcome for outcome in outcomes}


def run(options: argparse.Namespace, console: Console, record: TextIO | None) -> list[Outcome]:
    known = recorded(options.record)
    wanted = list(trials(options))
    outcomes = [known[trial] for trial in wanted if trial in known]
    todo = [trial for trial in wanted if trial not in known]
    with ProcessPoolExecutor(options.jobs) as pool, Progress(console=console) as progress:
        task = progress.add_task("planting", total=len(todo))
        for done in as_completed([pool.submit(outcome, trial, options.traces) for trial in todo]):
            result = done.result()
            outcomes.append(result)
            if record is not None:
                print(json.dumps(asdict(result)), file=record, flush=True)
            if result.faults or options.all:
                wrong = "WRONG: " + ", ".join(result.faults) if result.faults else ""
                progress.print(result.line, wrong, soft_wrap=True)
            progress.advance(task)
    return outcomes


def table_of(outcomes: list[Outcome]) -> Table:
    counted = [o for o in outcomes if o.faults is not None]
    tried = Counter((o.trial.log, o.trial.form) for o in counted)
    right = Counter((o.trial.log, o.trial.form) for o in counted if not o.faults)
    forms = list(dict.fromkeys(form for _, form in tried))
    table = Table("workload", *forms, title="breakers named, placed and mended")
    for log in dict.fromkeys(log for log, _ in tried):
        table.add_row(log, *(f"{right[log, form]} of {tried[log, form]}" for form in forms))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--logs", default="")
    parser.add_argument("--names", default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="a line for each breaker, not just for those missed")
    parser.add_argument("--record", type=Path, help="keep outcomes in this file, and go on from those in it")
    options = parser.parse_args()
    with nullcontext() if options.record is None else options.record.open("a") as record:
        outcomes = run(options, Console(stderr=True), record)
    console = Console()
    console.print(table_of(outcomes))
    missed = sum(bool(o.faults) for o in outcomes)
    console.print(f"{missed} of {sum(o.faults is not None for o in outcomes)} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
