"""Routing policies, and the rules of other routers, on workloads that none was tuned on.

    python benchmarks/policies.py [TRACE.jsonl.gz ...] [--json FILE]

Generated chats, agents, documents and one-shot prompts (seeds of this file), and both halves of every trace given. Each
is played to simulated replicas with the real cache, at two rates and with several draws of arrival times, for each
policy of Caudex and the published formula of each peer; figures are means of the draws. A policy loses a scene where
its mean (or 90th percentile) time to first token is the longer; the table counts and sums up.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from caudex.routing import POLICIES, Fleet, RouteRequest
from caudex.routing.policy import Stateless
from caudex.routing.prefix_index import PrefixAware
from caudex.routing.ranking import Ranking, Reason
from caudex.simulate import FleetSimulation, ReplicaLimits, RooflineModel, SimulationSettings, Slo, find_gpu, find_model
from caudex.simulate.workload import Workload, read_workload
from caudex.trace.generate import WorkloadSettings, generate

Row = dict[str, Any]

OURS = ("round_robin", "least_loaded", "session", "consistent_hash", "prefix", "cost")
MIXES: dict[str, dict[str, float]] = {
    "chat": {"chat": 1.0},
    "agent": {"agent": 1.0},
    "rag": {"rag": 1.0},
    "mixed": {"chat": 0.4, "agent": 0.2, "rag": 0.2, "one-shot": 0.2},
}
LOADS = (0.4, 0.8)
"""Prompt tokens that arrive, as a share of what all replicas can compute, were nothing cached."""


class CacheAware(PrefixAware):
    """SGLang's router: least requests when out of balance, else the best match above 0.3, else the least requests."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(None, seed)

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cached = self.index.cached_tokens(request, fleet)
        load = np.array([fleet.in_flight(slot) for slot in range(fleet.num_slots)], dtype=np.float64)
        unbalanced = load.max() - load.min() > 64 and load.max() > 1.5 * load.min()
        matches = not unbalanced and cached.max() > 0.3 * request.num_tokens
        return Ranking(-cached if matches else load, Reason.PREFIX, self._rng, cached=cached)


class BestMatch(CacheAware):
    """The longest prefix, whatever the load."""

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cached = self.index.cached_tokens(request, fleet)
        return Ranking(-cached, Reason.PREFIX, self._rng, used=fleet.in_flight_tokens, cached=cached)


class MatchWithinLoad(CacheAware):
    """AIBrix: least requests if they differ by more than 8, else the best match within a deviation of the mean."""

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cached = self.index.cached_tokens(request, fleet)
        load = np.array([fleet.in_flight(slot) for slot in range(fleet.num_slots)], dtype=np.float64)
        if load.max() - load.min() > 8:
            return Ranking(load, Reason.LOAD, self._rng, cached=cached)
        within = load <= load.mean() + load.std()
        return Ranking(np.where(within, -cached, np.inf), Reason.PREFIX, self._rng, used=load, cached=cached)


class PrefillLeft(CacheAware):
    """Dynamo: prefill left after the overlap, plus what runs there, in blocks; the least."""

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cached = self.index.cached_tokens(request, fleet)
        cost = fleet.queued_tokens + request.num_tokens - cached + fleet.in_flight_tokens
        return Ranking(cost, Reason.PREFIX, self._rng, cached=cached)


class ExploitOrExplore(CacheAware):
    """Preble's E2: the best match if more is cached than not, else the least of work, prefill and eviction."""

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        cached = self.index.cached_tokens(request, fleet)
        if cached.max() > request.num_tokens / 2:
            return Ranking(-cached, Reason.PREFIX, self._rng, used=fleet.in_flight_tokens, cached=cached)
        evicted = np.maximum(0, self.index.used_tokens(request, fleet) + request.num_tokens - fleet.capacity_tokens)
        work = fleet.load_tokens() + fleet.recent_tokens(now) + request.num_tokens - cached + evicted
        return Ranking(work, Reason.LOAD, self._rng, cached=cached)


class PrefixHash(Stateless):
    """The hash of the first 256 tokens on a ring; the least loaded where that worker has over 1.25 times the mean."""

    def __init__(self, *, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def rank(self, request: RouteRequest, fleet: Fleet, now: float) -> Ranking:
        home = request.prefix_key(256) % fleet.num_slots
        load = np.array([fleet.in_flight(slot) for slot in range(fleet.num_slots)], dtype=np.float64)
        if load[home] > 1.25 * max(load.mean(), 1.0):
            return Ranking(load, Reason.LOAD, self._rng)
        return Ranking(np.where(np.arange(fleet.num_slots) == home, 0.0, 1.0), Reason.HASH, self._rng)

    def record(self, request: RouteRequest, worker: int, now: float) -> None:
        """The hash needs no memory."""


PEERS = {
    "sglang cache_aware": CacheAware,
    "sglang prefix_hash": PrefixHash,
    "longest prefix": BestMatch,
    "aibrix": MatchWithinLoad,
    "dynamo": PrefillLeft,
    "preble e2": ExploitOrExplore,
}


def workloads(traces: list[Path], requests: int) -> Iterator[tuple[str, Workload]]:
    with tempfile.TemporaryDirectory() as folder:
        for seed, (name, mix) in enumerate(MIXES.items(), 1_000):
            path = Path(folder) / f"{name}.jsonl"
            settings = WorkloadSettings(requests=requests, documents=200, tenants=20, seed=seed)
            path.write_text("".join(json.dumps(body) + "\n" for body in generate(mix, settings)))
            yield name, read_workload(path, tokenizer="bytes")
    for path in traces:
        whole = read_workload(path, limit=4 * requests)
        half = len(whole) // 2
        name = path.name.partition(".")[0]
        yield f"{name}, first half", part(whole, 0, half)
        yield f"{name}, second half", part(whole, half, len(whole))


def part(workload: Workload, first: int, end: int) -> Workload:
    chosen, offsets = slice(first, end), workload.offsets[first : end + 1]
    return replace(
        workload,
        ids=workload.ids[offsets[0] : offsets[-1]],
        offsets=offsets - offsets[0],
        arrivals=workload.arrivals[chosen] - workload.arrivals[first],
        input_lengths=workload.input_lengths[chosen],
        output_lengths=workload.output_lengths[chosen],
        sessions=workload.sessions[chosen],
    )


def scenes(
    traces: list[Path], requests: int, replicas: int, draws: int
) -> Iterator[tuple[str, list[Workload], ReplicaLimits, RooflineModel]]:
    """A workload at one rate, arriving as often as there are draws, and replicas that together hold a third of its
    distinct blocks."""
    cost = RooflineModel(find_model("Llama-3.1-8B"), find_gpu("H100"), 1)
    for name, workload in workloads(traces, requests):
        distinct = len(np.unique(workload.ids))
        longest = int(np.diff(workload.offsets).max()) + 2
        blocks = max(distinct // 3 // replicas, 2 * longest)
        limits = ReplicaLimits(num_blocks=blocks, block_size=workload.block_size)
        for load in LOADS:
            rate = load * replicas * cost.prefill_rate() / float(workload.input_lengths.mean())
            arrivals = [workload.open_loop(rate, seed=7 + draw) for draw in range(draws)]
            yield f"{name}, load {load}", arrivals, limits, cost


def play(arrivals: list[Workload], replicas: int, limits: ReplicaLimits, policy: str, cost: RooflineModel) -> Row:
    """The figures of a policy in one scene."""
    summaries = []
    for draw, workload in enumerate(arrivals):
        settings = SimulationSettings(replicas, limits, policy, seed=3 + draw)
        summaries.append(FleetSimulation(workload, settings, cost).run().summary(Slo()))
    figures = {name: float(np.mean([s[name] for s in summaries])) for name in ("hit_rate", "imbalance")}
    times = {name: float(np.mean([s["ttft"][name] for s in summaries])) for name in ("mean", "p90")}
    return {"policy": policy, **figures, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--requests", type=int, default=2_000, help="of each generated workload; traces: twice a half")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--draws", type=int, default=2, help="of arrival times, for each scene")
    parser.add_argument("--ours", action="store_true", help="leave the rules of other routers out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, policy in PEERS.items():
        setattr(sys.modules[__name__], policy.__name__, policy)
        POLICIES[name] = (__name__, policy.__name__)
    names = OURS if args.ours else (*OURS, *PEERS)
    rows: list[Row] = []
    for scene, arrivals, limits, cost in scenes(args.traces, args.requests, args.replicas, args.draws):
        for name in names:
            row = {"scene": scene, **play(arrivals, args.replicas, limits, name, cost)}
            rows.append(row)
            print(
                f"{scene:44} {name:20} ttft mean {row['mean']:8.3f}  p90 {row['p90']:8.3f}  "
                f"hit {row['hit_rate']:6.1%}  busiest/mean {row['imbalance']:5.2f}",
                flush=True,
            )
    for figure in ("mean", "p90"):
        verdict(rows, names, figure)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


def verdict(rows: list[Row], names: tuple[str, ...], figure: str) -> None:
    """For each policy: in how many scenes it is within 3 % of the best, and how much longer its first token takes."""
    scenes = {row["scene"] for row in rows}
    best = {scene: min(row[figure] for row in rows if row["scene"] == scene) for scene in scenes}
    print(f"\n{len(scenes)} scenes; {figure} time to first token over that of the best policy of the scene")
    for name in names:
        mine = [row for row in rows if row["policy"] == name]
        ratios = [row[figure] / best[row["scene"]] for row in mine]
        geometric, wins = float(np.exp(np.mean(np.log(ratios)))), sum(ratio <= 1.03 for ratio in ratios)
        hits, busiest = (float(np.mean([row[name] for row in mine])) for name in ("hit_rate", "imbalance"))
        print(
            f"{name:20} best in {wins:2}  mean ratio {geometric:6.2f}  worst {max(ratios):7.2f}  "
            f"hit {hits:6.1%}  busiest/mean {busiest:5.2f}"
        )


if __name__ == "__main__":
    main()
