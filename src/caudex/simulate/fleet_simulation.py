"""Discrete events: arrivals, ends of steps, and changes of the fleet, in order of time."""

from __future__ import annotations

import heapq
import math
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

_Event = tuple[float, int, int, Replica, Job | None]
"""When, a number that breaks ties, slot and replica; the job that reaches it then, or None for the end of its steps."""


@dataclass(frozen=True, slots=True)
class FleetChange:
    """At `time` (seconds from the first arrival) a replica dies, taking its cache and what it was doing, or joins."""

    time: float
    kind: Literal["kill", "join"]
    replica: int
    """Number of the replica that dies or comes back; one that never was is new."""

    def __post_init__(self) -> None:
        if not 0 <= self.time < math.inf:
            raise ValueError(f"a change of the fleet at {self.time} s: it must be a number of seconds, not below 0")
        if self.replica < 0:
            raise ValueError(f"replica {self.replica}: numbers begin at 0")


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    num_replicas: int
    limits: ReplicaLimits
    policy: str = "cost"
    policy_settings: dict[str, Any] | None = None
    seed: int = 0
    changes: Sequence[FleetChange] = ()

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"{self.num_replicas} replicas; at least one is needed")


class FleetSimulation:
    """Runs one workload through one policy. Same workload, settings and seed: same result, to the bit.

    Requests that a killed replica had are sent again at once, as a gateway does before the first byte; tokens they had
    are counted as lost, and computed again. A request for which there is no replica, or that does not fit one, is
    refused.
    """

    def __init__(self, workload: Workload, settings: SimulationSettings, cost: CostModel) -> None:
        if settings.limits.block_size != workload.block_size:
            raise ValueError(
                f"the replicas' block size is {settings.limits.block_size}, the workload's {workload.block_size}; "
                "they must be the same"
            )
        self._workload = workload
        self._settings = settings
        self._cost = cost
        self._fleet = Fleet()
        self._policy = make_policy(settings.policy, seed=settings.seed, **(settings.policy_settings or {}))
        self._replicas: dict[int, Replica] = {}
        self._names: dict[int, int] = {}
        self._events: list[_Event] = []
        self._num_events = 0
        self._num_sent = 0
        self._past: dict[int, tuple[int, float]] = {}
        for number in range(settings.num_replicas):
            self._join(number)
        count = len(workload)
        self._first_tokens = np.full(count, np.nan)
        self._finishes = np.full(count, np.nan)
        self._refused = np.zeros(count, dtype=bool)
        self._cached = np.zeros(count, dtype=np.int64)
        self._replica_of = np.full(count, -1, dtype=np.int32)
        self._retries = np.zeros(count, dtype=np.int32)

    def run(self, progress: Callable[[int, int], None] | None = None) -> SimulationResult:
        """Runs to the last finish. `progress(done, total)` is called every so many arrivals.

        What it raises (KeyboardInterrupt, for one) leaves `result` to tell what was simulated until then.
        """
        workload = self._workload
        changes = sorted(self._settings.changes, key=lambda change: change.time)
        next_change = 0
        for i, arrival in enumerate(workload.arrivals.tolist()):
            while next_change < len(changes) and changes[next_change].time <= arrival:
                self._run_until(changes[next_change].time)
                self._change(changes[next_change])
                next_change += 1
            self._run_until(arrival)
            self._num_sent = i + 1
            self._send(i, arrival)
            if progress is not None and i % _PROGRESS_EVERY == 0:
                progress(i, len(workload))
        for change in changes[next_change:]:
            self._run_until(change.time)
            self._change(change)
        self._run_until(math.inf)
        if progress is not None:
            progress(len(workload), len(workload))
        return self.result()

    def result(self) -> SimulationResult:
        """What has become of the requests that have arrived so far."""
        sent, workload = slice(0, self._num_sent), self._workload
        work = dict(self._past)
        for slot, replica in self._replicas.items():
            tokens, seconds = work.get(self._names[slot], (0, 0.0))
            work[self._names[slot]] = tokens + replica.computed_tokens, seconds + replica.busy_seconds
        numbers = sorted(work)
        return SimulationResult(
            policy=self._settings.policy,
            arrivals=workload.arrivals[sent],
            first_tokens=self._first_tokens[sent],
            finishes=self._finishes[sent],
            refused=self._refused[sent],
            input_lengths=workload.input_lengths[sent],
            output_lengths=workload.output_lengths[sent],
            cached_tokens=self._cached[sent],
            replicas=self._replica_of[sent],
            retries=self._retries[sent],
            computed_by_replica=np.array([work[number][0] for number in numbers], dtype=np.float64),
            busy_seconds=np.array([work[number][1] for number in numbers]),
            infinite_cache_hits=workload.infinite_cache_hits[sent],
        )

    def _run_until(self, time: float) -> None:
        events, replicas = self._events, self._replicas
        while events and events[0][0] <= time:
            when, _, slot, replica, job = heapq.heappop(events)
            # Of a replica that is gone, or of a plan that was cut short, nothing happens any more.
            if replicas.get(slot) is not replica:
                continue
            if job is not None:
                self._arrive(slot, replica, job, when)
            elif replica.next_event == when:
                self._take(slot, replica, replica.advance(), when)

    def _take(self, slot: int, replica: Replica, events: StepEvents, now: float) -> None:
        for job in events.first_tokens:
            self._fleet.first_token(job.flight, now)
            self._first_tokens[job.index] = now
            self._cached[job.index] = job.cached
        for job in events.finished:
            self._fleet.land(job.flight, now)
            self._finishes[job.index] = now
        for job in events.refused:
            self._fleet.land(job.flight, now)
            self._refused[job.index] = True
        self._schedule(replica.next_event, slot, replica, None)

    def _schedule(self, time: float, slot: int, replica: Replica, job: Job | None) -> None:
        if time != math.inf:
            self._num_events += 1
            heapq.heappush(self._events, (time, self._num_events, slot, replica, job))

    def _send(self, i: int, now: float) -> None:
        workload = self._workload
        num_tokens = int(workload.input_lengths[i])
        path = workload.path(i)
        request = RouteRequest(
            keys=path.astype(np.uint64),
            tokens_per_key=float(workload.block_size),
            num_tokens=num_tokens,
            session=workload.sessions[i],
        )
        best = self._policy.rank(request, self._fleet, now).best
        if best is None:
            self._refused[i] = True
            return
        slot = best.worker
        self._policy.record(request, slot, now)
        flight = self._fleet.dispatch(slot, num_tokens, best.cached_tokens or 0, now)
        self._replica_of[i] = self._names[slot]
        job = Job(i, path, workload.own_id(i), num_tokens, int(workload.output_lengths[i]), flight)
        front = self._cost.front_seconds(num_tokens)
        if front > 0:
            self._schedule(now + front, slot, self._replicas[slot], job)
        else:
            self._arrive(slot, self._replicas[slot], job, now)

    def _arrive(self, slot: int, replica: Replica, job: Job, now: float) -> None:
        planned = replica.next_event
        events = replica.arrive(job, now)
        if events is not None:
            self._take(slot, replica, events, now)
        elif replica.next_event != planned:
            self._schedule(replica.next_event, slot, replica, None)

    def _join(self, number: int) -> None:
        limits = self._settings.limits
        slot = self._fleet.join(
            f"replica-{number}",
            capacity_tokens=float(limits.num_blocks * limits.block_size),
            prefill_rate=self._cost.prefill_rate(),
        )
        self._replicas[slot] = Replica(limits, self._cost)
        self._names[slot] = number

    def _change(self, change: FleetChange) -> None:
        members = self._fleet.members()
        name = f"replica-{change.replica}"
        if change.kind == "join" and name not in members:
            self._join(change.replica)
        elif change.kind == "kill" and name in members:
            self._kill(change.replica, members[name], change.time)

    def _kill(self, number: int, slot: int, now: float) -> None:
        replica = self._replicas.pop(slot)
        tokens, seconds = self._past.get(number, (0, 0.0))
        self._past[number] = tokens + replica.computed_tokens, seconds + replica.busy_seconds
        on_the_way = [event[4] for event in sorted(self._events, key=lambda event: event[1]) if event[3] is replica]
        lost = [*replica.jobs, *(job for job in on_the_way if job is not None)]
        for job in lost:
            self._fleet.land(job.flight, now)
        self._fleet.leave(f"replica-{number}")
        self._policy.forget(slot)
        for job in lost:
            self._first_tokens[job.index] = np.nan
            self._cached[job.index] = 0
            self._replica_of[job.index] = -1
            self._retries[job.index] += 1
            self._send(job.index, now)
