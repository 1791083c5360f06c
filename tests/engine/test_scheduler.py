"""The scheduler in virtual time, without a model: nothing is lost or computed twice, every budget is kept."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.engine.scheduler import OutputForecast
from caudex.engine.sequence_state import SequenceState

from .oracle import Oracle
from .virtual_engine import (
    VOCAB,
    assert_all_right,
    expected_output,
    make_engine,
    make_state,
    overtakes,
    random_tokens,
    run_to_end,
    submit_all,
)


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
    draft_tokens=st.integers(0, 5),
    error=st.sampled_from([0.0, 0.2, 1.0]),
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
    draft_tokens: int,
    error: float,
) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks,
        max_num_seqs=max_num_seqs,
        token_budget=max_num_seqs + extra_budget,
        max_overtakes=max_overtakes,
        index=index,
        shares=shares,
        draft_tokens=draft_tokens,
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
                answer = expected_output(state.prompt, namespace, state.max_output_tokens)
                state.lookup = Oracle(state.prompt, [answer], rng, error, VOCAB)
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
    assert engine.scheduler.num_accepted_tokens <= engine.scheduler.num_drafted_tokens
    if error == 1.0:
        assert engine.scheduler.num_accepted_tokens == 0


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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 70),
    token_budget=st.integers(8, 40),
    arrivals=st.lists(st.integers(0, 12), min_size=1, max_size=6),
)
def test_no_prefix_is_computed_twice_side_by_side(
    seed: int, length: int, token_budget: int, arrivals: list[int]
) -> None:
    """Requests of one prefix that arrive while it is computed, at any step, wait for it and compute their end alone."""
    engine = make_engine(300, max_num_seqs=8, token_budget=token_budget)
    shared = random_tokens(seed, length)
    states = submit_all(engine, [make_state(0, shared, 2)])
    tails = [[VOCAB + number] * (1 + number % 3) for number in range(len(arrivals))]
    for step in range(13):
        for tail in (tail for tail, arrival in zip(tails, arrivals, strict=True) if arrival == step):
            states += submit_all(engine, [make_state(len(states), shared + tail, 2)])
        if engine.scheduler.has_requests:
            engine.step()
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_computed_tokens == length + sum(map(len, tails)) + len(states)


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


def test_preemption_loses_no_more_than_the_tail() -> None:
    engine = make_engine(14, max_num_seqs=3, token_budget=64)
    states = submit_all(engine, [make_state(i, random_tokens(i, 9), 30) for i in range(3)])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.scheduler.num_preemptions > 0
    assert states[0].num_preemptions == 0, "the oldest is never preempted"
    assert engine.scheduler.num_queried_tokens == 27, "look-ups of resumed requests are not counted"
    stats = engine.cache.stats()
    assert (stats.requests, stats.resumed_requests) == (3, engine.scheduler.num_preemptions)


def test_nobody_is_admitted_in_a_step_that_has_preempted() -> None:
    """A small request would fit into the hole, and take what the one that gave way has computed."""
    engine = make_engine(14, max_num_seqs=3, token_budget=64)
    states = submit_all(engine, [make_state(i, random_tokens(i, 9), 30) for i in range(3)])
    while not engine.scheduler.num_preemptions:
        if len(engine.scheduler.waiting) < 2:
            states += submit_all(engine, [make_state(len(states), random_tokens(len(states), 2), 1, priority=1)])
        step = engine.step()
    assert step.num_preempted == 1
    assert len(engine.scheduler.running) < 3
    assert len(engine.scheduler.waiting) > 1
    run_to_end(engine)
    assert_all_right(engine, states)


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


def test_admission_sets_room_aside_for_what_running_requests_will_generate() -> None:
    """Both prompts fit at once with half of either answer, but not with half of both."""
    engine = make_engine(15, max_num_seqs=2, token_budget=64)
    states = submit_all(engine, [make_state(i, random_tokens(i, 20), 20) for i in range(2)])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.scheduler.num_preemptions == 0


def test_more_is_set_aside_after_a_preemption_and_ever_less_without() -> None:
    forecast, state = OutputForecast(), make_state(0, [0] * 4, 100)
    assert forecast.blocks(state, 4) == 13, "half of the answer"
    for _ in range(2000):
        forecast.note_step(preempted=False)
    assert forecast.blocks(state, 4) == 3, "a tenth"
    forecast.note_step(preempted=True)
    assert forecast.blocks(state, 4) == 8, "a fifth more"
    for _ in range(9):
        forecast.note_step(preempted=True)
    assert forecast.blocks(state, 4) == 25, "all of it"


def test_a_request_alone_gets_the_whole_pool() -> None:
    """Even where what it may yet generate is counted on, or where the block it would copy from is in its way."""
    engine = make_engine(8, max_num_seqs=2, token_budget=64)
    whole = random_tokens(1, 32)
    states = []
    for arrival, (prompt, max_output) in enumerate(((whole, 1), (whole, 1), ([8] * 4, 29))):
        states += submit_all(engine, [make_state(arrival, prompt, max_output)])
        run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.scheduler.num_preemptions == 0


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


def test_the_next_turn_hits_all_but_the_last_token_of_an_answer() -> None:
    """Also where neither prompt nor answer ends with a block."""
    engine = make_engine(20)
    first = make_state(0, random_tokens(0, 5), 6)
    submit_all(engine, [first])
    run_to_end(engine)
    second = make_state(1, [*first.tokens().tolist(), 3], 1)
    submit_all(engine, [second])
    run_to_end(engine)
    assert_all_right(engine, [first, second])
    assert second.num_cached == 10


def test_a_long_prompt_holds_up_no_answer() -> None:
    engine = make_engine(40, token_budget=16)
    first = make_state(0, random_tokens(0, 5), 12)
    submit_all(engine, [first])
    engine.step()
    submit_all(engine, [make_state(1, random_tokens(1, 100), 1)])
    for _ in range(5):
        engine.step()
    assert len(first.output) == 6


def test_an_answer_is_found_while_it_grows() -> None:
    engine = make_engine(40)
    first = make_state(0, random_tokens(0, 5), 30)
    submit_all(engine, [first])
    for _ in range(16):
        engine.step()
    second = make_state(1, first.tokens().tolist(), 1)
    submit_all(engine, [second])
    engine.step()
    assert second.num_cached is not None
    assert second.num_cached > 20 - 4, "less than a block behind what is computed"
