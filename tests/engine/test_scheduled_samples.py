"""Further samples of a prompt in the scheduler: they branch off where it ends."""

from __future__ import annotations

import pytest

from .virtual_engine import (
    assert_all_right,
    expected_output,
    make_engine,
    make_state,
    random_tokens,
    run_to_end,
    submit_all,
)


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


def test_a_sample_that_has_run_before_its_leader_goes_on_from_its_own_text() -> None:
    """It was admitted first, said two tokens and gave way: their prompt's logits are not for it."""
    engine = make_engine(100, max_num_seqs=8, token_budget=16)
    prompt = random_tokens(1, 42)
    leader = make_state(0, prompt, 3)
    said = expected_output(leader.prompt, "", 2)
    sample = make_state(1, prompt, 5, leader=leader, output=said, num_preemptions=1)
    states = submit_all(engine, [leader, sample])
    run_to_end(engine)
    assert_all_right(engine, states)
    assert engine.num_forks == 0


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
