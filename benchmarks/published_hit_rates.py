"""The hit rates published with the request logs, beside what Caudex finds on the same definitions.

    python benchmarks/published_hit_rates.py --traces DIR       # DIR holds mooncake_conversation.jsonl.gz and so on

Token hit rates in percent: requests one after another, each finished before the next; only full blocks are served, and
at least one token of a prompt is computed. Exits with 1 if a figure differs in its last digit.

Two columns are caches that nobody should serve with, see `caudex.cache.references`: the published FIFO is a queue of
single blocks, and "radix, whole leaves" does not touch the rest of a node that a match ends in, as SGLang does. In the
lower table two rows depend on what was not published, the hash function and the weight of the load; they are shown, not
compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from rich.console import Console
from rich.table import Table

from caudex.cache import BlockTrace, ReplaySettings, clairvoyant, hit_curve, replay
from caudex.cache.references import replay_reference
from caudex.routing import make_policy
from caudex.simulate import SequentialResult, read_workload, replay_sequentially
from hash_traces import load

COLUMNS = ("LRU", "FIFO", "LFU", "radix, whole leaves", "clairvoyant")
BY_POLICY = {
    ("mooncake_conversation", 2000): ("5.6", "5.5", "6.3", "5.6", "25.4"),
    ("mooncake_conversation", 10_000): ("21.9", "19.1", "13.5", "21.9", "37.3"),
    ("mooncake_conversation", 50_000): ("36.3", "34.2", "35.3", "36.3", "37.3"),
    ("mooncake_synthetic", 5000): ("29.0", "28.3", "21.5", "28.8", "53.5"),
    ("kvct_small", 10_000): ("75.4", "63.6", "48.0", "68.6", "83.5"),
}
"""Published, by log and capacity in blocks."""

REPLICAS, REPLICA_BLOCKS = 4, 5000


def published(fraction: float) -> str:
    """Round as the publication did: a percentage to hundredths, and that to tenths, halves up both times."""
    percent = Decimal(100) * Decimal(fraction)
    for digits in ("0.01", "0.1"):
        percent = percent.quantize(Decimal(digits), ROUND_HALF_UP)
    return str(percent)


def hit_rates(trace: BlockTrace, capacity: int) -> tuple[float, ...]:
    """Return the fractions under COLUMNS."""
    lru, lfu = replay(trace, [ReplaySettings(capacity, policy=policy) for policy in ("lru", "lfu")])
    assert hit_curve(trace).hit_rate(capacity) == lru.hit_rate, "the one-pass curve is the replay"
    fifo = replay_reference(trace, "block_fifo", capacity)
    leaves = replay_reference(trace, "whole_leaves", capacity)
    (bound,) = clairvoyant(trace, [capacity])
    return lru.hit_rate, fifo.hit_rate, lfu.hit_rate, leaves.hit_rate, bound.hit_rate


@dataclass(frozen=True, slots=True)
class RoutingRow:
    """How a fleet was routed, what it hit, and the computed tokens of its busiest replica over the mean."""

    name: str
    hit_rate: float
    imbalance: float
    published: tuple[str, str]
    compared: bool = True

    @property
    def agrees(self) -> bool:
        return not self.compared or self.published == (published(self.hit_rate), f"{self.imbalance:.1f}")


def routing_rows(log: Path) -> Iterator[RoutingRow]:
    """Yield one pool and the ways to split it, on the conversations."""
    workload = read_workload(log)

    def run(policy: str, replicas: int = REPLICAS, **settings: object) -> SequentialResult:
        blocks = REPLICA_BLOCKS * REPLICAS // replicas
        return replay_sequentially(
            workload, make_policy(policy, **settings), num_replicas=replicas, num_blocks=blocks, eviction="lru"
        )

    def row(name: str, result: SequentialResult, figures: tuple[str, str], *, compared: bool = True) -> RoutingRow:
        return RoutingRow(name, result.hit_rate, result.imbalance, figures, compared)

    yield row("one pool", run("round_robin", 1), ("30.0", "1.0"))
    yield row("round robin", run("round_robin"), ("12.6", "1.0"))
    yield row("longest prefix alone", run("prefix", recent_weight=0.0), ("12.1", "4.0"))
    yield row("hash of the first 1k tokens", run("consistent_hash", by="prefix"), ("30.0", "1.03"), compared=False)
    yield row("longest prefix minus load", run("prefix", recent_weight=0.02), ("29.8", "1.00"), compared=False)


def show_policies(traces: Path, console: Console) -> bool:
    table = Table("log", "blocks", *COLUMNS, title="hit % (published, where it differs)")
    agrees = True
    loaded: dict[str, BlockTrace] = {}
    for (name, capacity), figures in BY_POLICY.items():
        trace = loaded.setdefault(name, load(traces / f"{name}.jsonl.gz"))
        found = [published(rate) for rate in hit_rates(trace, capacity)]
        agrees &= found == list(figures)
        cells = [ours if ours == theirs else f"{ours} ({theirs})" for ours, theirs in zip(found, figures, strict=True)]
        table.add_row(name, f"{capacity:,}", *cells)
    console.print(table)
    return agrees


def show_routing(traces: Path, console: Console) -> bool:
    rows = list(routing_rows(traces / "mooncake_conversation.jsonl.gz"))
    table = Table(
        "routing", "hit %", "busiest / mean", "published", title=f"{REPLICAS} replicas of {REPLICA_BLOCKS:,} blocks"
    )
    for row in rows:
        table.add_row(row.name, published(row.hit_rate), f"{row.imbalance:.2f}", " / ".join(row.published))
    console.print(table)
    return all(row.agrees for row in rows)


def main() -> None:
    """Compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the logs")
    args = parser.parse_args()
    for name in {name for name, _ in BY_POLICY}:
        if not (log := args.traces / f"{name}.jsonl.gz").exists():
            parser.error(f"--traces: there is no {log}")
    console = Console(width=120)
    agrees = show_policies(args.traces, console)
    agrees &= show_routing(args.traces, console)
    sys.exit(0 if agrees else 1)


if __name__ == "__main__":
    main()
