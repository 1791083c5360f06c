"""The scheduler in virtual time, without a model: nobody starves, nothing is lost, every budget is kept."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.cache import PrefixCache
from caudex.engine.scheduler import Scheduler
from caudex.engine.sequence_state import SequenceState
from caudex.engine.waiting_queue import WaitingQueue

from .virtual_engine import VOCAB, VirtualEngine, expected_output, expected_scores


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
        if state.num_alternatives is not None:
            assert state.prompt_scores == expected_scores(state.prompt, state.namespace, state.num_alternatives)
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
            namespace, priority, leader = rng.choice(["", "", "tenant"]), rng.choice([0, 0, 0, 1]), None
            num_alternatives = rng.choice([0, 1, 3]) if rng.random() < 0.3 else None
            for _ in range(rng.randrange(2, 5) if rng.random() < 0.3 else 1):
                state = make_state(
                    len(states),
                    prompt,
                    rng.randrange(1, longest - len(prompt) + 1 if rng.random() < 0.2 else 8),
                    namespace=namespace,
                    priority=priority,
                    num_alternatives=num_alternatives,
                    leader=leader,
                )
                leader = leader or state
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


def random_tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def submit_all(engine: VirtualEngine, states: list[SequenceState]) -> list[SequenceState]:
    for state in states:
        engine.submit(state)
    return states


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_equal_prefixes_are_computed_once(index: str) -> None:
    """Eight requests of one prefix arrive at once: seven wait for the first, then hit."""
    engine = make_engine(100, max_num_seqs=8, token_budget=16, index=index)
    shared = random_tokens(1, 40)
    states = submit_all(engine, [make_state(i, shared + random_tokens(9 + i, 2), 3) for i in range(8)])
    run_to_end(engine)
    assert_all_right(engine, states)
    prefill = engine.num_computed_tokens - 8 * 2
    assert prefill <= 40 + 8 * (2 + 1), "the shared part was computed more than once"


def test_requests_of_one_step_share_what_it_writes() -> None:
    engine = make_engine(100, max_num_seqs=8, token_budget=64)
    shared = random_tokens(1, 40)
    states = submit_all(engine, [make_state(i, [*shared, 10 + i, 0], 1) for i in range(4)])
    step = engine.step()
    assert len(step.chunks) == 4
    assert [chunk.start for chunk in step.chunks] == [0, 40, 40, 40]
    assert_all_right(engine, states)


def test_a_waiting_request_survives_the_one_it_waits_for() -> None:
    engine = make_engine(100, max_num_seqs=8, token_budget=8)
    shared = random_tokens(1, 40)
    first, second = submit_all(engine, [make_state(0, shared, 4), make_state(1, shared, 4)])
    engine.step()
    assert [state.request_id for state in engine.scheduler.running] == ["r0"]
    engine.abort(first)
    run_to_end(engine)
    assert_all_right(engine, [first, second])
    assert second.num_cached == 8, "what the first had computed before it was cancelled is still used"


def test_groups_of_one_prefix_run_together() -> None:
    """Six documents, six questions each, round robin, a pool for three, two at once: every document is read once."""
    engine = make_engine(36, max_num_seqs=2, token_budget=32, max_overtakes=64)
    documents = [random_tokens(100 + i, 40) for i in range(6)]
    states = [
        make_state(question * 6 + document, documents[document] + random_tokens(question, 3), 2)
        for question in range(6)
        for document in range(6)
    ]
    submit_all(engine, states)
    run_to_end(engine)
    assert_all_right(engine, states)
    hit_rate = engine.scheduler.num_hit_tokens / engine.scheduler.num_queried_tokens
    assert hit_rate > 0.95 * (36 - 6) / 36 * 40 / 43


def test_at_most_max_overtakes_younger_ones_go_first() -> None:
    """A request that hits nothing, and an endless stream of ones that hit everything."""
    for max_overtakes in (0, 1, 5, 20):
        engine = make_engine(60, max_num_seqs=1, max_overtakes=max_overtakes)
        popular = random_tokens(1, 16)
        states = submit_all(engine, [make_state(0, popular, 1)])
        run_to_end(engine)
        states += submit_all(engine, [make_state(1, popular, 1), make_state(2, [10] * 16, 1)])
        while "r2" not in engine.finished:
            states += submit_all(engine, [make_state(len(states), popular, 1)])
            engine.step()
        run_to_end(engine)
        assert_all_right(engine, states)
        assert 0.9 * max_overtakes <= overtakes(engine)["r2"] <= max_overtakes


def test_priority_goes_before_share_and_after_the_bound() -> None:
    engine = make_engine(60, max_num_seqs=1, max_overtakes=3)
    popular = random_tokens(1, 16)
    submit_all(engine, [make_state(0, popular, 1)])
    run_to_end(engine)
    states = [make_state(1, popular, 1, priority=1)]
    states += [make_state(i, [10 + i] * 16, 1, priority=0) for i in range(2, 8)]
    submit_all(engine, states)
    run_to_end(engine)
    assert [state.arrival for state in engine.admissions[1:]] == [2, 3, 4, 1, 5, 6, 7]


def test_an_overdue_request_that_does_not_fit_lets_nobody_pass() -> None:
    engine = make_engine(12, max_num_seqs=4, max_overtakes=0)
    big, small = random_tokens(1, 40), random_tokens(2, 4)
    states = submit_all(
        engine, [make_state(0, random_tokens(3, 12), 12), make_state(1, big, 4), make_state(2, small, 1)]
    )
    run_to_end(engine)
    assert_all_right(engine, states)
    assert [state.arrival for state in engine.admissions] == [0, 1, 2]


def test_a_request_that_becomes_overdue_after_it_was_skipped_lets_nobody_pass() -> None:
    queue = WaitingQueue(max_overtakes=1)
    old, young, younger = (make_state(arrival, [arrival], 1) for arrival in range(3))
    for state in (old, young, younger):
        queue.add(state)
    queue.skip(old)
    assert queue.best() is young
    queue.admit(young.request_id)
    assert queue.best() is None
    queue.end_skips()
    assert queue.best() is old


def test_preemption_loses_no_more_than_the_tail() -> None:
    engine = make_engine(14, max_num_seqs=3, token_budget=64)
    states = submit_all(engine, [make_state(i, random_tokens(i, 9), 30) for i in range(3)])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.scheduler.num_preemptions > 0
    assert states[0].num_preemptions == 0, "the oldest is never preempted"
    assert engine.scheduler.num_queried_tokens == 27, "look-ups of resumed requests are not counted"


@pytest.mark.parametrize("token_budget", [16, 64], ids=["in chunks", "in one step"])
@pytest.mark.parametrize("length", [41, 42, 44])
def test_samples_branch_off_where_their_prompt_ends(token_budget: int, length: int) -> None:
    """One computes the prompt; the others take no token of any step until they have one to go on from."""
    engine = make_engine(100, max_num_seqs=8, token_budget=token_budget)
    prompt = random_tokens(1, length)
    leader = make_state(0, prompt, 3)
    states = submit_all(engine, [leader, *(make_state(i, prompt, 3, leader=leader) for i in range(1, 6))])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_forks == 5
    assert engine.num_computed_tokens == length + 6 * 2
    assert engine.scheduler.num_queried_tokens == length, "what branches off is not looked up"


def test_the_least_urgent_gives_way_first() -> None:
    engine = make_engine(14, max_num_seqs=3, token_budget=64)
    states = [make_state(i, random_tokens(i, 9), 30, priority=int(i == 0)) for i in range(3)]
    submit_all(engine, states[:1])
    engine.step()
    submit_all(engine, states[1:])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert states[0].num_preemptions > 0, "the oldest, but the least urgent"
    assert states[1].num_preemptions == 0


def test_samples_that_find_no_room_are_served_later() -> None:
    engine = make_engine(100, max_num_seqs=3, token_budget=16)
    prompt = random_tokens(1, 42)
    leader = make_state(0, prompt, 9)
    states = submit_all(engine, [leader, *(make_state(i, prompt, 9, leader=leader) for i in range(1, 6))])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_forks == 2


def test_a_sample_survives_the_request_it_would_branch_off() -> None:
    engine = make_engine(100, max_num_seqs=8, token_budget=16)
    prompt = random_tokens(1, 42)
    leader = make_state(0, prompt, 3)
    states = submit_all(engine, [leader, make_state(1, prompt, 3, leader=leader)])
    engine.step()
    engine.abort(leader)
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_computed_tokens == 42 + 2, "what the first had computed is not computed again"


def test_samples_let_no_overdue_or_more_urgent_request_wait() -> None:
    for others in ({"priority": -1}, {}):
        engine = make_engine(100, max_num_seqs=2, token_budget=64, max_overtakes=0)
        prompt = random_tokens(1, 20)
        leader = make_state(0, prompt, 2)
        waiting = make_state(1, random_tokens(2, 20), 2, **others)
        late = make_state(2, prompt, 2, leader=leader)
        submit_all(engine, [leader])
        engine.scheduler._max_num_seqs = 1
        submit_all(engine, [waiting, late])
        step = engine.step()
        engine.scheduler._max_num_seqs = 2
        assert not step.forks
        run_to_end(engine)
        assert [state.arrival for state in engine.admissions] == [0, 1, 2]


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_scored_beginning_is_not_computed_again(index: str) -> None:
    """Four prompts over one beginning, as a benchmark of multiple choices sends them: all scored, one at a time."""
    engine = make_engine(100, max_num_seqs=1, token_budget=64, index=index)
    shared = random_tokens(1, 40)
    states = submit_all(engine, [make_state(i, [*shared, i, 1], 1, num_alternatives=1) for i in range(4)])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_computed_tokens == 42 + 3 * 3, "the last scored token, whose logits score the next, and two more"


def test_scoring_waits_for_the_scores_of_another() -> None:
    engine = make_engine(100, max_num_seqs=4, token_budget=16)
    shared = random_tokens(1, 40)
    states = submit_all(engine, [make_state(i, [*shared, i, 1], 1, num_alternatives=1) for i in range(4)])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_computed_tokens == 42 + 3 * 3


def test_scores_with_too_few_alternatives_are_found_anew() -> None:
    engine = make_engine(100, max_num_seqs=1, token_budget=64)
    prompt = random_tokens(1, 40)
    states = submit_all(
        engine, [make_state(i, prompt, 1, num_alternatives=wanted) for i, wanted in enumerate((1, 2, 0))]
    )
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_computed_tokens == 40 + 40 + 2


def test_evicted_scores_are_forgotten() -> None:
    """A block that is taken for other tokens brings no scores of the old ones."""
    engine = make_engine(12, max_num_seqs=1, token_budget=64)
    prompts = [random_tokens(seed, 40) for seed in range(4)]
    states = []
    for turn in range(12):
        wanted = [None, 0][turn % 2] if turn > 3 else 0
        states.append(make_state(turn, prompts[turn * 3 % 4], 1, num_alternatives=wanted))
    submit_all(engine, states)
    run_to_end(engine)
    assert_all_right(engine, states)


def test_a_failed_step_takes_back_what_it_promised() -> None:
    engine = make_engine(40, token_budget=64)
    prompt = random_tokens(1, 20)
    engine.submit(make_state(0, prompt, 2))
    step = engine.scheduler.schedule()
    assert [state.request_id for state in engine.scheduler.fail(step)] == ["r0"]
    assert engine.cache.num_free_blocks == 40
    again = submit_all(engine, [make_state(1, prompt, 2)])
    run_to_end(engine)
    assert_all_right(engine, again)
    assert again[0].num_cached == 0


def test_ten_thousand_waiting_are_ordered_like_ten() -> None:
    """The last of a very long queue is still found when its prefix is cached."""
    engine = make_engine(3000, max_num_seqs=1, token_budget=64, max_overtakes=100_000)
    popular = random_tokens(1, 16)
    states = submit_all(engine, [make_state(0, popular, 1)])
    run_to_end(engine)
    rng = np.random.default_rng(0)
    for arrival in range(1, 10_001):
        state = SequenceState(f"r{arrival}", arrival, rng.integers(10, 10_000, 16, dtype=np.int32), 1)
        engine.scheduler.add(state)
    engine.scheduler.add(make_state(10_001, popular, 1))
    for _ in range(200):
        step = engine.scheduler.schedule()
        chunk = step.chunks[0]
        chunk.state.output.append(0)
        engine.scheduler.complete(step)
        engine.scheduler.finish(chunk.state)
        if chunk.state.arrival == 10_001:
            break
    assert chunk.state.arrival == 10_001
    assert len(states) == 1
