"""What eviction policies reach on real request logs, between LRU and the clairvoyant bound.

    python benchmarks/eviction.py --traces DIR              # DIR holds mooncake_conversation.jsonl.gz and so on
    python benchmarks/eviction.py --traces DIR --check      # against the published figures; exits 1 if one differs
    python benchmarks/eviction.py --traces DIR --json FILE

Token hit rates: requests one after another, each finished before the next; only full blocks are served, and at least
one token of a prompt is computed. "Gap" is (policy - LRU) / (clairvoyant - LRU).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from caudex.cache import (
    BlockTrace,
    PrefixCache,
    ReplaySettings,
    clairvoyant,
    hit_curve,
    policy_names,
    replay,
)
from hash_traces import load

CAPACITIES = {
    "mooncake_conversation": [1000, 2000, 5000, 10_000, 20_000, 50_000],
    "mooncake_synthetic": [1000, 5000, 10_000],
    "kvct_small": [5000, 10_000, 20_000, 50_000],
}
"""Blocks, by the name of the log."""

PUBLISHED = [
    ("mooncake_conversation", 2000, {"lru": 5.6, "lfu": 6.3, "radix, whole leaves": 5.6, "clairvoyant": 25.4}),
    ("mooncake_conversation", 10_000, {"lru": 21.9, "lfu": 13.5, "radix, whole leaves": 21.9, "clairvoyant": 37.3}),
    ("mooncake_conversation", 50_000, {"lru": 36.3, "lfu": 35.3, "radix, whole leaves": 36.3, "clairvoyant": 37.3}),
    ("mooncake_synthetic", 5000, {"lru": 29.0, "lfu": 21.5, "radix, whole leaves": 28.8, "clairvoyant": 53.5}),
    ("kvct_small", 10_000, {"lru": 75.4, "lfu": 48.0, "radix, whole leaves": 68.6, "clairvoyant": 83.5}),
]
"""Percent, from the notes that come with the logs."""

WHOLE_LEAVES = "radix, whole leaves"


def whole_leaves_rate(trace: BlockTrace, capacity: int) -> float:
    """Replay through SGLang's rules, whose radix tree evicts whole leaves."""
    cache = PrefixCache.like_sglang(capacity, 1)
    hits = 0
    full = trace.num_full_blocks.tolist()
    for i, length in enumerate(trace.input_lengths.tolist()):
        path = trace.block_ids[trace.offsets[i] : trace.offsets[i] + full[i]]
        if not full[i]:
            continue
        sequence = cache.begin([*path.tolist(), 0])  # one token is left to compute: that one
        hits += min(sequence.num_cached_tokens, max(length - 1, 0) // trace.block_size)
        kept = min(full[i], capacity)
        sequence.allocate(kept)
        sequence.commit(kept)
        sequence.release()
    return hits * trace.block_size / trace.prompt_tokens


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


def check(traces: Path, console: Console) -> bool:
    """Compare with the published figures, to the digit."""
    loaded: dict[str, BlockTrace] = {}
    agrees = True
    for name, capacity, figures in PUBLISHED:
        trace = loaded.setdefault(name, load(traces / f"{name}.jsonl.gz"))
        settings = [ReplaySettings(capacity, policy=policy) for policy in ("lru", "lfu")]
        ours = {str(result.settings.policy): result.hit_rate for result in replay(trace, settings)}
        (bound,) = clairvoyant(trace, [capacity])
        ours |= {"clairvoyant": bound.hit_rate, WHOLE_LEAVES: whole_leaves_rate(trace, capacity)}
        for policy, published in figures.items():
            same = abs(100.0 * ours[policy] - published) < 0.0501
            agrees &= same
            console.print(
                f"{name} @ {capacity:,} {policy}: {ours[policy]:.2%}, published {published} %",
                style="green" if same else "red",
            )
        console.print(
            f"{name} @ {capacity:,} curve equals replay: {hit_curve(trace).hit_rate(capacity) == ours['lru']}"
        )
    return agrees


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the logs")
    parser.add_argument("--logs", default=",".join(CAPACITIES), help="which of them, by name")
    parser.add_argument("--policies", default=",".join(name for name in policy_names() if name != "lru"))
    parser.add_argument("--check", action="store_true", help="compare with the published figures instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=200)
    if args.check:
        sys.exit(0 if check(args.traces, console) else 1)
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
