"""How fast a fleet of a thousand replicas is simulated, and how near to real servers.

    python benchmarks/simulation.py TRACE [--replicas 1000] [--requests 1000000] [--policy cost] [--json FILE]
    python benchmarks/simulation.py LOG --validate [--rates 1,2,3] [--seconds 60] [--through client,cost] [--fit FILE]

TRACE (a hash trace) is laid side by side with copies of itself, each with block ids of its own, until there are enough
requests; they arrive together, so the load grows with the number of copies.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

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
from simulation_validation import Run, print_reports, validate


def copies_of(workload: Workload, num_requests: int) -> Workload:
    """The workload beside copies of itself that share nothing, each begun within a minute of the first."""
    num_copies = -(-num_requests // len(workload))
    num_ids = 1 + int(workload.ids.max(initial=-1))
    shifts = np.random.default_rng(0).uniform(0, 60, num_copies)
    arrivals = (workload.arrivals + shifts[:, None]).ravel()
    order = np.argsort(arrivals, kind="stable")[:num_requests]
    copy_of, request_of = np.divmod(order, len(workload))
    lengths = np.diff(workload.offsets)[request_of]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    source = np.arange(offsets[-1]) + np.repeat(workload.offsets[request_of] - offsets[:-1], lengths)
    ids = workload.ids[source] + np.repeat(copy_of * num_ids, lengths)
    return Workload(
        ids.astype(np.int32),
        offsets,
        arrivals[order] - arrivals[order[0]],
        workload.input_lengths[request_of],
        workload.output_lengths[request_of],
        workload.block_size,
        [f"{copy}:{request}" for copy, request in zip(copy_of.tolist(), request_of.tolist(), strict=True)],
    )


def measure_scale(args: argparse.Namespace) -> dict[str, Any]:
    workload = copies_of(read_workload(args.trace), args.requests)
    cost = RooflineModel(find_model("Llama-3.1-8B"), find_gpu("H100"))
    limits = ReplicaLimits(cost.kv_capacity_tokens() // workload.block_size, workload.block_size)
    began, cpu = time.perf_counter(), time.process_time()
    result = FleetSimulation(workload, SimulationSettings(args.replicas, limits, args.policy), cost).run()
    return {
        "replicas": args.replicas,
        "requests": len(workload),
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "summary": result.summary(Slo()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", type=int, default=1_000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", default="cost")
    parser.add_argument(
        "--validate", action="store_true", help="against two real servers; see simulation_validation.py"
    )
    parser.add_argument("--rates", default="1,2,3", help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--through", default="client,cost", help="client, or policies of a gateway")
    parser.add_argument("--fit", type=Path, help="cost model: read if there, else measured and written")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: Any
    if args.validate:
        ways = [None if name == "client" else name for name in args.through.split(",")]
        runs = [Run(float(rate), args.seconds, way) for way in ways for rate in args.rates.split(",")]
        report = validate(args.trace, runs, args.fit)
        print_reports(report)
    else:
        report = measure_scale(args)
        print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
