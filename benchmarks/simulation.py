"""How fast a fleet of a thousand replicas is simulated.

    python benchmarks/simulation.py TRACE [--replicas 1000] [--requests 1000000] [--policy cost] [--json FILE]

TRACE (a hash trace) is laid side by side with copies of itself, each with block ids of its own, until there are enough
requests; they arrive together, so the load grows with the number of copies.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from caudex.simulate import (
    FleetSimulation,
    ReplicaLimits,
    RooflineModel,
    SimulationSettings,
    Slo,
    Workload,
    find_gpu,
    find_model,
    read_workload,
)


def copies_of(workload: Workload, num_requests: int) -> Workload:
    num_copies = -(-num_requests // len(workload))
    num_blocks = 1 + max(int(path.max(initial=0)) for path in workload.paths)
    spread = np.random.default_rng(0).uniform(0, 60, num_copies)
    arrivals = np.concatenate([workload.arrivals + shift for shift in spread])
    order = np.argsort(arrivals, kind="stable")[:num_requests]
    copy_of, request_of = np.divmod(order, len(workload))
    return Workload(
        [workload.paths[i] + np.int32(num_blocks * copy) for copy, i in zip(copy_of, request_of, strict=True)],
        arrivals[order],
        workload.input_lengths[request_of],
        workload.output_lengths[request_of],
        workload.block_size,
        [f"{copy}:{i}" for copy, i in zip(copy_of, request_of, strict=True)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    workload = copies_of(read_workload(args.trace), args.requests)
    cost = RooflineModel(find_model("Llama-3.1-8B"), find_gpu("H100"))
    limits = ReplicaLimits(cost.kv_capacity_tokens() // workload.block_size, workload.block_size)
    began = time.perf_counter()
    result = FleetSimulation(workload, SimulationSettings(args.replicas, limits, args.policy), cost).run()
    seconds = time.perf_counter() - began
    report = {
        "replicas": args.replicas,
        "requests": len(workload),
        "seconds": seconds,
        "us_per_request": seconds / len(workload) * 1e6,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "summary": result.summary(Slo()),
    }
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
