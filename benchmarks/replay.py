"""How fast logs run through the cache, the curve and the bound, on one core.

    python benchmarks/replay.py --traces DIR [--json FILE]

Millions of block references a second of CPU time, medians. Reading the log is not counted; `build` is making the trace
from its ids, once for all that follows. Run it under `taskset -c 0`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caudex.cache import BlockTrace, ReplaySettings, clairvoyant, hit_curve, policy_names, replay
from hash_traces import load_arrays

CAPACITIES = {"mooncake_conversation": 10_000, "mooncake_synthetic": 10_000, "kvct_small": 20_000}
"""Blocks, by the name of the log."""


def rate(trace: BlockTrace, run: Callable[[], object], repeats: int) -> float:
    """Return millions of block references a second of CPU time."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return int(trace.num_full_blocks.sum()) / statistics.median(times) / 1e6


def measure(arrays: dict[str, Any], capacity: int, repeats: int) -> dict[str, float]:
    """Return the rate of building the trace, of the curve, the bound, and a replay under each policy."""
    trace = BlockTrace.from_arrays(**arrays)
    figures = {
        "build": rate(trace, lambda: BlockTrace.from_arrays(**arrays), repeats),
        "hit_curve": rate(trace, lambda: hit_curve(trace), repeats),
        "clairvoyant": rate(trace, lambda: clairvoyant(trace, [capacity]), repeats),
    }
    for policy in policy_names():
        settings = [ReplaySettings(capacity, policy=policy)]
        figures[policy] = rate(trace, lambda settings=settings: replay(trace, settings), repeats)  # type: ignore[misc]
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder of the logs")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = {}
    for name, capacity in CAPACITIES.items():
        report[name] = measure(load_arrays(args.traces / f"{name}.jsonl.gz"), capacity, args.repeats)
        print(f"{name} @ {capacity:,} blocks")
        for what, figure in report[name].items():
            print(f"  {what:14} {figure:8.1f} M/s")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
