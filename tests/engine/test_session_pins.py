"""Conversations whose blocks are kept: within a budget and a time, and never in the way of one that could not run."""

from __future__ import annotations

import pytest

from caudex.engine.sequence_state import SequenceState
from caudex.engine.session_pins import SessionPins

from .virtual_engine import (
    VirtualEngine,
    assert_all_right,
    make_engine,
    make_state,
    random_tokens,
    run_to_end,
    submit_all,
)


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
