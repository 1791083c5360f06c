"""Discrete events: arrivals, ends of steps, and changes of the fleet, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from caudex.routing import Fleet, RouteRequest, make_policy
from caudex.simulate.cost_model import CostModel
from caudex.simulate.replica import Job, Replica, ReplicaLimits, StepEvents
from caudex.simulate.result import SimulationResult
from caudex.simulate.workload import Workload

_PROGRESS_EVERY = 1_000


@dataclass(frozen=True, slots=True)
class FleetChange:
    """At `time` (seconds from the first arrival) a replica dies, taking its cache and what it was doing, or joins."""

    time: float
    kind: Literal["kill", "join"]
    replica: int
    """Number of the replica that dies or comes back; one that never was is new."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    num_replicas: int
    limits: ReplicaLimits
    policy: str = "cost"
    policy_settings: dict[str, Any] | None = None
    seed: int = 0
    changes: Sequence[FleetChange] = ()


class FleetSimulation:
    """Runs one workload through one policy. Same workload, settings and seed: same result, to the bit.

    Requests that a killed replica had are sent again at once, as a gateway does before the first byte; tokens they had
    are counted as lost, and computed again.
    """

    def __init__(self, workload: Workload, settings: SimulationSettings, cost: CostModel) -> None:
        self._workload = workload
        self._settings = settings
        self._cost = cost
        self._fleet = Fleet()
        self._policy = make_policy(settings.policy, seed=settings.seed, **(settings.policy_settings or {}))
        self._replicas: dict[int, Replica] = {}
        self._names: dict[int, int] = {}
        self._events: list[tuple[float, int, int, Replica]] = []
        self._num_events = 0
        self._computed: dict[int, float] = {}
        self._busy: dict[int, float] = {}
        for number in range(settings.num_replicas):
            self._join(number)
        count = len(workload)
        self._first_tokens = np.full(count, np.nan)
        self._finishes = np.full(count, np.nan)
        self._cached = np.zeros(count, dtype=np.int64)
        self._replica_of = np.full(count, -1, dtype=np.int32)
        self._retries = np.zeros(count, dtype=np.int32)

    def run(self, progress: Callable[[int, int], None] | None = None) -> SimulationResult:
        """Runs to the last finish. `progress(done, total)` is called every so many arrivals."""
        workload = self._workload
        changes = sorted(self._settings.changes, key=lambda change: change.time)
        next_change = 0
        for i, arrival in enumerate(workload.arrivals.tolist()):
            while next_change < len(changes) and changes[next_change].time <= arrival:
                self._run_until(changes[next_change].time)
                self._change(changes[next_change])
                next_change += 1
            self._run_until(arrival)
            self._send(i, arrival)
            if progress is not None and i % _PROGRESS_EVERY == 0:
                progress(i, len(workload))
        for change in changes[next_change:]:
            self._run_until(change.time)
            self._change(change)
        self._run_until(float("inf"))
        if progress is not None:
            progress(len(workload), len(workload))
        return self._result()

    def _run_until(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            when, _, slot, replica = heapq.heappop(self._events)
            # An event of a plan that was cut short, or of a replica that is gone.
            if self._replicas.get(slot) is not replica or replica.next_event != when:
                continue
            self._take(slot, replica, replica.advance(), when)

    def _take(self, slot: int, replica: Replica, events: StepEvents, now: float) -> None:
        for job in events.first_tokens:
            self._fleet.first_token(job.flight, now)
            self._first_tokens[job.index] = now
            self._cached[job.index] = job.cached
            self._computed[self._names[slot]] += job.input_length - job.cached
        for job in events.finished:
            self._fleet.land(job.flight, now)
            self._finishes[job.index] = now
        for job in events.refused:
            self._fleet.land(job.flight, now)
        if replica.next_event is not None:
            self._schedule(slot, replica)

    def _schedule(self, slot: int, replica: Replica) -> None:
        assert replica.next_event is not None
        self._num_events += 1
        heapq.heappush(self._events, (replica.next_event, self._num_events, slot, replica))

    def _send(self, i: int, now: float) -> None:
        request = self._request(i)
        best = self._policy.rank(request, self._fleet, now).best
        if best is None:
            return
        self._policy.record(request, best.worker, now)
        flight = self._fleet.dispatch(best.worker, request.num_tokens, best.cached_tokens or 0, now)
        self._replica_of[i] = self._names[best.worker]
        replica = self._replicas[best.worker]
        planned = replica.next_event
        job = Job(i, self._workload.paths[i], request.num_tokens, int(self._workload.output_lengths[i]), flight)
        events = replica.arrive(job, now)
        if replica.next_event != planned or planned is None:
            self._take(best.worker, replica, events, now)

    def _request(self, i: int) -> RouteRequest:
        workload = self._workload
        return RouteRequest(
            keys=workload.keys(i),
            tokens_per_key=float(workload.block_size),
            num_tokens=int(workload.input_lengths[i]),
            session=workload.sessions[i],
        )

    def _join(self, number: int) -> None:
        limits = self._settings.limits
        slot = self._fleet.join(
            f"replica-{number}",
            capacity_tokens=float(limits.num_blocks * limits.block_size),
            prefill_rate=self._cost.prefill_rate(),
        )
        self._replicas[slot] = Replica(limits, self._cost, self._workload.partial_block_id)
        self._names[slot] = number
        self._computed.setdefault(number, 0.0)
        self._busy.setdefault(number, 0.0)

    def _change(self, change: FleetChange) -> None:
        members = self._fleet.members()
        name = f"replica-{change.replica}"
        if change.kind == "join":
            if name not in members:
                self._join(change.replica)
            return
        if name not in members:
            return
        slot = self._fleet.leave(name)
        replica = self._replicas.pop(slot)
        self._busy[change.replica] += replica.busy_seconds
        self._policy.forget(slot)
        for job in replica.jobs:
            self._computed[change.replica] += max(0, job.prefilled - job.cached)
            self._fleet.land(job.flight, change.time)
            self._first_tokens[job.index] = np.nan
            self._retries[job.index] += 1
            self._send(job.index, change.time)

    def _result(self) -> SimulationResult:
        for slot, replica in self._replicas.items():
            self._busy[self._names[slot]] += replica.busy_seconds
        workload = self._workload
        return SimulationResult(
            policy=self._settings.policy,
            arrivals=workload.arrivals,
            first_tokens=self._first_tokens,
            finishes=self._finishes,
            input_lengths=workload.input_lengths,
            output_lengths=workload.output_lengths,
            cached_tokens=self._cached,
            replicas=self._replica_of,
            retries=self._retries,
            computed_by_replica=np.array([self._computed[number] for number in sorted(self._computed)]),
            busy_seconds=np.array([self._busy[number] for number in sorted(self._busy)]),
            infinite_cache_hits=workload.infinite_cache_hits(),
        )
