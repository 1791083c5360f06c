"""What a routing decision costs, and what the index of prefixes weighs.

python benchmarks/routing.py [--workers 64,1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from caudex.routing import POLICIES, Fleet, RouteRequest, make_policy, text_request
from caudex.routing.sent_index import SentIndex

PROMPT_BYTES = 32_768


def prompts(count: int, seed: int) -> list[bytes]:
    """Half of each is a system prompt, one of eight; the other half is the user's own."""
    rng = np.random.default_rng(seed)

    def text() -> bytes:
        return rng.integers(97, 123, PROMPT_BYTES // 2, dtype=np.uint8).tobytes()

    systems = [text() for _ in range(8)]
    return [systems[i % 8] + text() for i in range(count)]


def decision(name: str, num_workers: int, requests: list[RouteRequest]) -> dict[str, Any]:
    """Median microseconds of ranking and recording with a full index and load on every worker."""
    fleet = Fleet()
    for i in range(num_workers):
        fleet.join(f"http://worker-{i}:8000")
    rng = np.random.default_rng(0)
    for slot in rng.integers(0, num_workers, 4 * num_workers):
        fleet.dispatch(int(slot), int(rng.integers(100, 10_000)), 0, 0.0)
    policy = make_policy(name)
    ranks, records = [], []
    for now, request in enumerate(requests * 2):
        began = time.perf_counter()
        best = policy.rank(request, fleet, float(now)).best
        ranked = time.perf_counter()
        assert best is not None
        policy.record(request, best.worker, float(now))
        records.append(time.perf_counter() - ranked)
        ranks.append(ranked - began)
    half = len(requests)
    return {
        "policy": name,
        "workers": num_workers,
        "rank_us": statistics.median(ranks[half:]) * 1e6,
        "record_us": statistics.median(records[half:]) * 1e6,
    }


def hashing(texts: list[bytes]) -> float:
    """Median microseconds to turn one prompt into keys."""
    times = []
    for text in texts:
        began = time.perf_counter()
        text_request(text)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def index_growth(num_requests: int) -> list[tuple[int, float]]:
    """Megabytes of the index after so many unique prompts on four workers: it fills and then stays."""
    fleet, index, points = Fleet(), SentIndex(), []
    for i in range(4):
        fleet.join(str(i))
    rng = np.random.default_rng(0)
    for i in range(num_requests):
        request = text_request(rng.integers(97, 123, 4_096, dtype=np.uint8).tobytes())
        index.cached_tokens(request, fleet)
        index.record(request, i % 4, float(i) * 0.01)
        if (i + 1) % (num_requests // 8) == 0:
            points.append((i + 1, index.num_bytes / 1e6))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="64,1000")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    texts = prompts(400, 0)
    requests = [text_request(text, session=str(i % 100)) for i, text in enumerate(texts)]
    report: dict[str, Any] = {"prompt_bytes": PROMPT_BYTES, "hashing_us": hashing(texts), "decisions": []}
    print(f"keys of a {PROMPT_BYTES // 1024} KB prompt: {report['hashing_us']:.1f} us")
    for num_workers in (int(count) for count in args.workers.split(",")):
        for name in POLICIES:
            row = decision(name, num_workers, requests)
            report["decisions"].append(row)
            print(
                f"{num_workers:5} workers  {name:16} rank {row['rank_us']:6.1f} us  record {row['record_us']:5.1f} us"
            )
    report["index_mb"] = index_growth(80_000)
    for count, megabytes in report["index_mb"]:
        print(f"index after {count:6} unique 4 KB prompts: {megabytes:.1f} MB")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
