"""One replica against the engine's own scheduler, both in virtual time."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.virtual_engine import VOCAB, VirtualEngine
from tests.simulate.workloads import workload_of

from caudex.cache import PrefixCache
from caudex.engine.scheduler import Scheduler
from caudex.engine.sequence_state import SequenceState
from caudex.simulate import FleetSimulation, ReplicaLimits, SimulationSettings, StepWork

AMPLE_BLOCKS = 10_000


@dataclass(frozen=True)
class OneSecondSteps:
    """With which a step's number is its time."""

    def step_seconds(self, work: StepWork) -> float:
        return 1.0

    def front_seconds(self, num_tokens: int) -> float:
        return 0.0

    def prefill_rate(self) -> float:
        return 100.0


@dataclass(frozen=True)
class Asked:
    arrival: float
    prompt: list[int]
    num_output: int


def served_by_the_engine(requests: list[Asked], limits: ReplicaLimits) -> list[tuple[int, float, float]]:
    """Cached tokens, time of the first token and of the last, of each request."""
    cache = PrefixCache(AMPLE_BLOCKS, 1)
    scheduler = Scheduler(
        cache,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_overtakes=limits.max_overtakes,
    )
    engine = VirtualEngine(cache, scheduler, limits.max_num_seqs, limits.max_num_batched_tokens)
    states = [
        SequenceState(str(i), i, np.array(asked.prompt, dtype=np.int32), asked.num_output)
        for i, asked in enumerate(requests)
    ]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    coming = deque(zip(requests, states, strict=True))
    now = 0.0
    while coming or scheduler.has_requests:
        if not scheduler.has_requests:
            now = max(now, coming[0][0].arrival)
            engine.submit(coming.popleft()[1])
        while coming and coming[0][0].arrival < now:
            engine.submit(coming.popleft()[1])
        step = engine.step()
        now += 1.0
        for chunk in step.chunks:
            if chunk.samples:
                first.setdefault(chunk.state.request_id, now)
        for request_id in engine.finished:
            last.setdefault(request_id, now)
    return [(state.num_cached or 0, first[state.request_id], last[state.request_id]) for state in states]


def served_by_the_replica(requests: list[Asked], limits: ReplicaLimits) -> list[tuple[int, float, float]]:
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for asked in requests:
        prefixes = itertools.accumulate(((token,) for token in asked.prompt), lambda prefix, token: prefix + token)
        path = [ids.setdefault(prefix, len(ids)) for prefix in prefixes]
        rows.append((asked.arrival, path, len(path), asked.num_output))
    simulation = FleetSimulation(workload_of(rows, block_size=1), SimulationSettings(1, limits), OneSecondSteps())
    result = simulation.run()
    columns = result.cached_tokens.tolist(), result.first_tokens.tolist(), result.finishes.tolist()
    return list(zip(*columns, strict=True))


@st.composite
def traffic(draw: st.DrawFn) -> list[Asked]:
    """Prompts that share stems. Their tokens are none that the virtual engine's model generates, and no two arrivals
    have the same fraction of a second, so that none falls on the end of a step."""
    stems = draw(st.lists(st.lists(st.integers(VOCAB, VOCAB + 2), max_size=25), min_size=1, max_size=3))
    shape = st.tuples(
        st.integers(0, 40), st.sampled_from(stems), st.lists(st.integers(VOCAB, VOCAB + 2), min_size=1, max_size=12)
    )
    rows = sorted(draw(st.lists(shape, min_size=1, max_size=24)), key=lambda row: row[0])
    outputs = draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    return [
        Asked(second + i / 1_024, stem + rest, output)
        for i, ((second, stem, rest), output) in enumerate(zip(rows, outputs, strict=True))
    ]


@settings(max_examples=150, deadline=None)
@given(
    requests=traffic(),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 20),
    max_overtakes=st.integers(0, 5),
)
def test_a_replica_does_what_the_engine_does(
    requests: list[Asked], max_num_seqs: int, extra_budget: int, max_overtakes: int
) -> None:
    """To the token and to the step: what each request hits, when it sees its first token, and when it is done."""
    limits = ReplicaLimits(
        AMPLE_BLOCKS,
        1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        worth_waiting=1,
        max_overtakes=max_overtakes,
    )
    assert served_by_the_replica(requests, limits) == served_by_the_engine(requests, limits)
