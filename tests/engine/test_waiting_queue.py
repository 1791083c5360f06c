"""Who is admitted next: what is cached, how urgent it is, and how often it was passed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from caudex.engine.sequence_state import SequenceState
from caudex.engine.waiting_queue import WaitingQueue

from .virtual_engine import assert_all_right, make_engine, make_state, overtakes, random_tokens, run_to_end, submit_all


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
    queue.begin_step()
    assert queue.best() is old


def test_what_was_skipped_is_tried_again_in_its_turn_and_when_there_is_room() -> None:
    queue = WaitingQueue(max_overtakes=100)
    states = [make_state(arrival, [arrival], 1) for arrival in range(200)]
    for state in states:
        queue.add(state)
    queue.stale(1000)
    for state in states:
        queue.skip(state)
    queue.begin_step()
    assert queue.best() is None
    tried_again = queue.stale(64)
    assert 0 < len(tried_again) <= 64
    queue.begin_step()
    assert queue.best() in tried_again
    queue.end_skips()
    assert queue.best() is states[0]


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


def test_a_full_pool_costs_a_long_queue_a_few_look_ups_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands wait and none fits: each step tries a few, in turn, and all are served in the end."""
    engine = make_engine(10, max_num_seqs=4, max_overtakes=5000)
    states = submit_all(engine, [make_state(0, random_tokens(1, 20), 19)])
    engine.step()
    states += submit_all(engine, [make_state(arrival, random_tokens(2, 25), 2) for arrival in range(1, 501)])
    num_looked_up, match = [0], engine.cache.match

    def counting(*arguments: Any, **others: Any) -> Any:
        num_looked_up[-1] += 1
        return match(*arguments, **others)

    monkeypatch.setattr(engine.cache, "match", counting)
    while "r0" not in engine.finished:
        num_looked_up.append(0)
        engine.step()
    assert 0 < max(num_looked_up[:-1]) <= 16
    run_to_end(engine)
    assert_all_right(engine, states)
