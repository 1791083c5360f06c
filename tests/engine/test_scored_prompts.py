"""Prompts that are scored, in the scheduler: what is known of a beginning is not found twice."""

from __future__ import annotations

import pytest

from .virtual_engine import assert_all_right, make_engine, make_state, random_tokens, run_to_end, submit_all


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
