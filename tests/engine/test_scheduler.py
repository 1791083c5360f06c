"""The scheduler in virtual time, without a model: nobody starves, nothing is lost, every budget is kept."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.cache import PrefixCache
from caudex.engine.scheduler import OutputForecast, Scheduler
from caudex.engine.sequence_state import SequenceState
from caudex.engine.session_pins import SessionPins
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
    stats = engine.cache.stats()
    assert (stats.requests, stats.resumed_requests) == (3, engine.scheduler.num_preemptions)


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


@pytest.mark.parametrize(
    ("order", "priority", "max_overtakes", "num_forks"),
    [((1, 2), 0, 0, 0), ((2, 1), 0, 0, 1), ((1, 2), -1, 8, 0), ((1, 2), 0, 8, 1)],
    ids=["older and overdue", "younger and overdue", "more urgent", "older"],
)
def test_samples_pass_no_overdue_or_more_urgent_request(
    order: tuple[int, int], priority: int, max_overtakes: int, num_forks: int
) -> None:
    """A prompt ends in a step whose budget it takes whole, so another request has to wait just when a sample forks."""
    engine = make_engine(100, max_num_seqs=2, token_budget=20, max_overtakes=max_overtakes)
    prompt = random_tokens(1, 40)
    leader = make_state(0, prompt, 2)
    other = make_state(order[0], random_tokens(2, 20), 2, priority=priority)
    states = submit_all(engine, [leader])
    engine.step()
    states += submit_all(engine, [other, make_state(order[1], prompt, 2, leader=leader)])
    assert len(engine.step().forks) == num_forks
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.admissions[1].arrival == (order[1] if num_forks else order[0])


def test_a_sample_that_the_pool_will_not_hold_to_its_end_waits() -> None:
    engine = make_engine(11, max_num_seqs=2, token_budget=64)
    prompt = random_tokens(1, 20)
    leader = make_state(0, prompt, 20)
    states = submit_all(engine, [leader, make_state(1, prompt, 20, leader=leader)])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_forks == engine.scheduler.num_preemptions == 0


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


def test_what_does_not_fit_yet_lets_smaller_ones_pass() -> None:
    engine = make_engine(12, max_num_seqs=4)
    states = submit_all(
        engine,
        [
            make_state(0, random_tokens(3, 12), 12),
            make_state(1, random_tokens(1, 40), 4),
            make_state(2, random_tokens(2, 4), 1),
        ],
    )
    run_to_end(engine)
    assert_all_right(engine, states)
    assert [state.arrival for state in engine.admissions] == [0, 2, 1]


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


def test_what_an_admission_evicts_no_longer_counts() -> None:
    """The most urgent request takes the blocks that one of the others would have hit: the other one goes first."""
    engine = make_engine(14, max_num_seqs=2, token_budget=64)
    old, new = random_tokens(1, 16), random_tokens(2, 16)
    states = []
    for arrival, prompt in enumerate((old, new)):
        states += submit_all(engine, [make_state(arrival, prompt, 1)])
        run_to_end(engine)
    states += submit_all(
        engine,
        [
            make_state(2, random_tokens(3, 32), 1, priority=-1),
            make_state(3, [*old, 0], 1),
            make_state(4, [*new, 0], 1),
        ],
    )
    run_to_end(engine)
    assert_all_right(engine, states)
    assert [state.arrival for state in engine.admissions[2:]] == [2, 4, 3]


def test_a_prompt_just_computed_is_found_by_those_alike_however_long_the_queue() -> None:
    engine = make_engine(3000, max_num_seqs=1, token_budget=64, max_overtakes=100_000)
    popular = random_tokens(1, 20)
    alike = make_state(300, [*popular, 1], 1)
    submit_all(engine, [make_state(i, [10 + i] * 16, 1) for i in range(300)])
    engine.submit(alike)
    for _ in range(10):
        engine.step()
    engine.submit(make_state(301, popular, 1, priority=-1))
    engine.step()
    engine.step()
    assert [state.arrival for state in engine.admissions[-2:]] == [301, 300]


def test_a_new_request_is_looked_up_at_once_however_long_the_queue() -> None:
    engine = make_engine(3000, max_num_seqs=1, token_budget=64, max_overtakes=100_000)
    popular = random_tokens(1, 20)
    engine.submit(make_state(0, popular, 1))
    run_to_end(engine)
    submit_all(engine, [make_state(i, [10 + i] * 16, 1) for i in range(1, 301)])
    for _ in range(10):
        engine.step()
    engine.submit(make_state(301, popular, 1))
    engine.step()
    assert engine.admissions[-1].arrival == 301


def test_waiting_makes_up_for_what_is_not_cached() -> None:
    """Passed half as often as may be, a request that hits nothing goes before those that hit half."""
    engine = make_engine(200, max_num_seqs=1, max_overtakes=20)
    popular = random_tokens(1, 8)
    states = submit_all(engine, [make_state(0, popular, 1)])
    run_to_end(engine)
    states += submit_all(engine, [make_state(1, [10] * 16, 1)])
    while "r1" not in engine.finished:
        states += submit_all(engine, [make_state(len(states), [*popular, *[10 + len(states)] * 8], 1)])
        engine.step()
    run_to_end(engine)
    assert_all_right(engine, states)
    assert overtakes(engine)["r1"] == 10


def test_how_often_a_request_was_passed_outlasts_its_preemption() -> None:
    queue = WaitingQueue(max_overtakes=2)
    old, *younger = (make_state(arrival, [arrival], 1) for arrival in range(3))
    for state in (old, *younger):
        queue.add(state)
    queue.admit("r1")
    queue.admit("r0")
    queue.add(old)
    queue.admit("r2")
    assert queue.is_overdue(old)


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
    engine = make_engine(11, max_num_seqs=1, token_budget=64)
    old, new = random_tokens(0, 44), random_tokens(1, 40)
    states = []
    for arrival, (prompt, num_alternatives) in enumerate(((old, 0), (new, None), (new, 0))):
        states += submit_all(engine, [make_state(arrival, prompt, 1, num_alternatives=num_alternatives)])
        run_to_end(engine)
    assert_all_right(engine, states)
    assert states[2].num_cached == 0, "nothing of it had been scored"


def test_a_block_taken_for_an_answer_brings_no_scores() -> None:
    engine = make_engine(11, max_num_seqs=1, token_budget=64)
    asked = make_state(1, random_tokens(1, 4), 40, num_alternatives=0)
    states = [make_state(0, random_tokens(0, 40), 1, num_alternatives=0), asked]
    for state in states:
        engine.submit(state)
        run_to_end(engine)
    states += submit_all(engine, [make_state(2, asked.tokens()[:40].tolist(), 1, num_alternatives=0)])
    run_to_end(engine)
    assert_all_right(engine, states)


def test_a_sample_takes_the_scores_of_its_prompt_along_and_no_others() -> None:
    """The block that the end of the prompt is copied to had scores of its own."""
    engine = make_engine(13, max_num_seqs=2, token_budget=64)
    prompt = random_tokens(1, 42)
    leader = make_state(1, prompt, 1, num_alternatives=0)
    sample = make_state(2, prompt, 3, num_alternatives=0, leader=leader)
    states = submit_all(engine, [make_state(0, random_tokens(0, 48), 1, num_alternatives=0)])
    run_to_end(engine)
    states += submit_all(engine, [leader, sample])
    run_to_end(engine)
    assert engine.num_forks == 1
    states += submit_all(engine, [make_state(3, sample.tokens().tolist(), 1, num_alternatives=0)])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert states[3].num_cached == 41, "the last token that was scored"


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


def test_kept_sessions_stay_within_their_budget_and_time() -> None:
    now = [100.0]
    engine = make_engine(40, token_budget=64, pin_budget=8)
    pins, cache = SessionPins(engine.cache, lambda: now[0]), engine.cache
    small, other, large = (make_state(i, random_tokens(i, length), 1) for i, length in enumerate((12, 12, 40)))
    submit_all(engine, [small, other, large])
    run_to_end(engine)
    pins.keep("a", small, 5.0)
    pins.keep("large", large, 5.0)
    pins.keep("b", other, 9.0)
    assert (len(pins), cache.num_pinned_blocks) == (2, 6), "the large one would go beyond the budget"
    now[0] += 2
    pins.keep("a", small, 4.0)
    assert (len(pins), cache.num_pinned_blocks) == (2, 6)
    assert pins.seconds_to_next() == 4.0, "a session's later pin takes the place of the earlier one"
    now[0] += 3.5
    pins.release_expired()
    assert (len(pins), pins.seconds_to_next()) == (2, 0.5)
    now[0] += 0.5
    pins.release_expired()
    assert (len(pins), pins.seconds_to_next(), cache.num_pinned_blocks) == (1, 3.0, 3)
    now[0] += 3
    pins.release_expired()
    assert (len(pins), pins.seconds_to_next(), cache.num_pinned_blocks) == (0, None, 0)


def engine_with_kept_session(num_blocks: int) -> tuple[VirtualEngine, list[SequenceState]]:
    """An engine whose pool holds four blocks for a conversation."""
    engine = make_engine(num_blocks, max_num_seqs=2, token_budget=64)
    states = submit_all(engine, [make_state(0, random_tokens(0, 16), 1)])
    run_to_end(engine)
    engine.scheduler.pins.keep("session", states[0], 3600.0)
    assert engine.cache.num_pinned_blocks == 4
    return engine, states


@pytest.mark.parametrize(("length", "max_output"), [(40, 1), (4, 40)], ids=["prompt", "answer"])
def test_kept_sessions_give_way_to_one_that_could_not_run(length: int, max_output: int) -> None:
    engine, states = engine_with_kept_session(11)
    states += submit_all(engine, [make_state(1, random_tokens(1, length), max_output)])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert (len(engine.scheduler.pins), engine.scheduler.num_preemptions) == (0, 0)


def test_kept_sessions_stay_where_requests_can_run_one_after_another() -> None:
    engine, _ = engine_with_kept_session(12)
    submit_all(engine, [make_state(i, random_tokens(i, 4), 20) for i in (1, 2)])
    run_to_end(engine)
    assert engine.scheduler.num_preemptions > 0
    assert engine.cache.num_pinned_blocks == 4
    engine.scheduler.pins.release_all()
    assert engine.cache.num_pinned_blocks == 0


def test_a_conversation_that_is_back_takes_no_room_for_what_was_kept() -> None:
    engine, states = engine_with_kept_session(14)
    states += submit_all(engine, [make_state(1, random_tokens(1, 20), 4)])
    engine.step()
    states += submit_all(engine, [make_state(2, [*states[0].prompt.tolist(), 0], 2)])
    engine.step()
    assert [state.arrival for state in engine.scheduler.running] == [1, 2]


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
