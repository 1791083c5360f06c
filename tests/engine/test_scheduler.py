"""The scheduler in virtual time, without a model: nobody starves, nothing is lost, every budget is kept."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.cache import PrefixCache
from caudex.engine.scheduler import Scheduler
from caudex.engine.sequence_state import SequenceState

from .virtual_engine import VOCAB, VirtualEngine, expected_output


def make_engine(
    num_blocks: int,
    block_size: int = 4,
    *,
    max_num_seqs: int = 4,
    token_budget: int = 16,
    max_overtakes: int = 8,
    **others: Any,
) -> VirtualEngine:
    shares = others.pop("shares", True)
    cache = PrefixCache(num_blocks, block_size, **others)
    scheduler = Scheduler(
        cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_overtakes=max_overtakes,
        shares=shares,
    )
    return VirtualEngine(cache, scheduler, max_num_seqs, token_budget)


def make_state(arrival: int, prompt: list[int], max_output: int, **others: Any) -> SequenceState:
    return SequenceState(f"r{arrival}", arrival, np.array(prompt, dtype=np.int32), max_output, **others)


def run_to_end(engine: VirtualEngine, limit: int = 5_000) -> None:
    while engine.scheduler.has_requests:
        engine.step()
        assert engine.num_steps < limit, "requests do not finish"


def assert_all_right(engine: VirtualEngine, states: list[SequenceState]) -> None:
    """Every request ended once, with the tokens it gets alone, and holds nothing any more."""
    assert set(engine.finished) | engine.aborted == {state.request_id for state in states}
    for state in engine.finished.values():
        assert state.output == expected_output(state.prompt, state.namespace, state.max_output_tokens)
    cache = engine.cache
    assert cache.num_pinned_blocks == 0
    assert cache.num_free_blocks + cache.num_cached_blocks == cache.num_blocks


def overtakes(engine: VirtualEngine) -> dict[str, int]:
    """For each request, how many younger ones were first admitted before it was."""
    first = {}
    for place, state in enumerate(engine.admissions):
        first.setdefault(state.request_id, (place, state.arrival))
    places = list(first.values())
    return {
        request_id: sum(1 for other_place, other_arrival in places if other_arrival > arrival and other_place < place)
        for request_id, (place, arrival) in first.items()
    }


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_requests=st.integers(1, 24),
    index=st.sampled_from(["radix", "hash"]),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 12),
    num_blocks=st.integers(9, 40),
    max_overtakes=st.integers(0, 6),
    shares=st.sampled_from([True, True, True, False]),
)
def test_random_traffic(
    seed: int,
    num_requests: int,
    index: str,
    max_num_seqs: int,
    extra_budget: int,
    num_blocks: int,
    max_overtakes: int,
    shares: bool,
) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks,
        max_num_seqs=max_num_seqs,
        token_budget=max_num_seqs + extra_budget,
        max_overtakes=max_overtakes,
        index=index,
        shares=shares,
    )
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 18))] for _ in range(3)]
    states: list[SequenceState] = []
    longest = num_blocks * 4
    while len(states) < num_requests or engine.scheduler.has_requests:
        if len(states) < num_requests and rng.random() < 0.5:
            prompt = rng.choice(stems)[: rng.randrange(1, 20)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(8))]
            prompt = prompt or [0]
            state = make_state(
                len(states),
                prompt,
                rng.randrange(1, longest - len(prompt) + 1 if rng.random() < 0.2 else 8),
                namespace=rng.choice(["", "", "tenant"]),
                priority=rng.choice([0, 0, 0, 1]),
            )
            states.append(state)
            engine.submit(state)
        alive = [s for s in states if s.request_id not in engine.finished and s.request_id not in engine.aborted]
        if alive and rng.random() < 0.05:
            engine.abort(rng.choice(alive))
        if engine.scheduler.has_requests:
            engine.step()
        assert engine.num_steps < 20_000, "requests do not finish"
    assert_all_right(engine, states)
    assert max(overtakes(engine).values(), default=0) <= max_overtakes
