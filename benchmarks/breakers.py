"""Plants breakers of every kind in logs of several workloads and forms, and tells which are named, placed and mended.

    python benchmarks/breakers.py [--traces FOLDER] [--forms messages,prompts] [--names iso_clock_head,...]

One line a plant: the broken log's hit rate, the rate that the analysis says mending the first finding brings, the clean
log's own rate, and what was found where. With `--traces` (a folder with `text/tau_airline.openai.jsonl.gz` and
`text/lmcache_miniswe.plain.jsonl.gz`) real logs are broken too. Exit status 1 where a message log's breaker is missed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.analysis.plants import PLANTS, Body, Plant
from tests.analysis.plants.logs import FORMS, analyzed, generated, has

from caudex.analysis.results import Analysis

REAL = {"tau_airline": "text/tau_airline.openai.jsonl.gz", "miniswe": "text/lmcache_miniswe.plain.jsonl.gz"}
GENERATED = {"agent": 120, "chat": 120, "rag": 120, "few-shot": 120, "chat+rag+agent": 150}
REQUESTS = 120
SKIPPED_REQUESTS = 1500
"""Of a real log: the mutants in circulation are made of its first requests."""

LEAST_LOSS = 0.005


def logs(traces: Path | None) -> Iterator[tuple[str, list[Body]]]:
    for mix, requests in GENERATED.items():
        yield mix, generated(mix, requests, seed=29)
    for name, file in REAL.items() if traces is not None else ():
        assert traces is not None
        with gzip.open(traces / file) as lines:
            bodies = [json.loads(line) for line in lines]
        first = SKIPPED_REQUESTS if len(bodies) > SKIPPED_REQUESTS + REQUESTS else 0
        sessions = {body["session_id"] for body in bodies[first : first + REQUESTS]}
        chosen = islice((body for body in bodies if body["session_id"] in sessions), REQUESTS)
        yield name, [{key: value for key, value in body.items() if key != "output"} for body in chosen]


def faults(plant: Plant, form: str, wanted: float, found: Analysis) -> list[str]:
    if not found.breakers:
        return ["nothing found"]
    first = found.breakers[0]
    named = form != "messages" or first.kind in plant.kinds
    placed = form != "messages" or re.search(plant.place, first.where.description)
    mended = abs(first.hit_rate_if_mended - wanted) <= plant.slack
    told = {"kind": named, "place": placed, "rate": mended}
    return [fault for fault, right in told.items() if not right]


def line_of(plant: Plant, wanted: float, found: Analysis) -> str:
    first = found.breakers[0] if found.breakers else None
    told = f"{first.hit_rate_if_mended:.3f} {wanted:.3f}  {first.kind} at {first.where.description}" if first else "-"
    return f"{plant.name:27s} {found.infinite_hit_rate:.3f} {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--logs", default="")
    parser.add_argument("--names", default="")
    options = parser.parse_args()
    tried = missed = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "log.jsonl"
        for name, log in logs(options.traces):
            if options.logs and name not in options.logs.split(","):
                continue
            for form in options.forms.split(","):
                clean = analyzed(FORMS[form](log), file)
                alarms = ", ".join(breaker.kind for breaker in clean.breakers) or "clean"
                print(f"\n{name}, {form}: {len(log)} requests, hit rate {clean.infinite_hit_rate:.3f}, {alarms}")
                for plant in PLANTS.values():
                    if not plant.needs <= has(log) or (options.names and plant.name not in options.names.split(",")):
                        continue
                    wanted = analyzed(FORMS[form](plant.clean(log)), file).infinite_hit_rate
                    found = analyzed(FORMS[form](plant.mutate(log)), file)
                    if wanted - found.infinite_hit_rate < LEAST_LOSS:
                        continue
                    wrong = faults(plant, form, wanted, found)
                    tried += 1
                    missed += bool(wrong) and form == "messages"
                    print(line_of(plant, wanted, found), "WRONG: " + ", ".join(wrong) if wrong else "", flush=True)
    print(f"\n{tried} breakers tried, {missed} in message logs missed or mended otherwise")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
