"""What eviction policies reach on real request logs, between LRU and the clairvoyant bound.

    python benchmarks/eviction.py --traces DIR              # DIR holds mooncake_conversation.jsonl.gz and so on
    python benchmarks/eviction.py --traces DIR --json FILE

Token hit rates: requests one after another, each finished before the next; only full blocks are served, and at least
one token of a prompt is computed. "Gap" is (policy - LRU) / (clairvoyant - LRU).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from caudex.cache import BlockTrace, ReplaySettings, clairvoyant, hit_curve, policy_names, replay
from hash_traces import load

CAPACITIES = {
    "mooncake_conversation": [1000, 2000, 5000, 10_000, 20_000, 50_000],
    "mooncake_synthetic": [1000, 5000, 10_000],
    "kvct_small": [5000, 10_000, 20_000, 50_000],
}
"""Blocks, by the name of the log."""


def measure(trace: BlockTrace, capacities: list[int], policies: list[str], progress: Progress, name: str) -> Any:
    """Return rows of capacity and hit rates by policy, LRU and the bound included."""
    curve = hit_curve(trace)
    rows = [
        {"capacity_blocks": bound.capacity, "lru": curve.hit_rate(bound.capacity), "clairvoyant": bound.hit_rate}
        for bound in clairvoyant(trace, capacities)
    ]
    settings = [ReplaySettings(capacity, policy=policy) for policy in policies for capacity in capacities]
    task = progress.add_task(name, total=None)
    results = replay(trace, settings, lambda done, total: progress.update(task, completed=done, total=total))
    for row, capacity in zip(rows, capacities, strict=True):
        row.update({str(r.settings.policy): r.hit_rate for r in results if r.settings.num_blocks == capacity})
    return rows


def show(name: str, rows: list[dict[str, float]], policies: list[str], console: Console) -> None:
    """Print one log's table: rates in percent, and the part of the gap that a policy closes."""
    table = Table(title=name)
    for heading in ("blocks", "LRU", *policies, "clairvoyant"):
        table.add_column(heading, justify="right")
    for row in rows:
        gap = row["clairvoyant"] - row["lru"]
        cells = [f"{row[p]:.1%} ({(row[p] - row['lru']) / gap:+.0%})" if gap > 1e-4 else "-" for p in policies]
        table.add_row(f"{row['capacity_blocks']:,}", f"{row['lru']:.1%}", *cells, f"{row['clairvoyant']:.1%}")
    console.print(table)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the logs")
    parser.add_argument("--logs", default=",".join(CAPACITIES), help="which of them, by name")
    parser.add_argument("--policies", default=",".join(name for name in policy_names() if name != "lru"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=200)
    policies = args.policies.split(",")
    report = {}
    for name in args.logs.split(","):
        with Progress(console=Console(stderr=True)) as progress:
            report[name] = measure(load(args.traces / f"{name}.jsonl.gz"), CAPACITIES[name], policies, progress, name)
        show(name, report[name], policies, console)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
