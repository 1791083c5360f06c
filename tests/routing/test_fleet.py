from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.routing import Fleet, Flight, LoadReport


def test_a_slot_is_reused_clean() -> None:
    fleet = Fleet()
    fleet.join("a")
    slot = fleet.join("b")
    fleet.dispatch(slot, 100, 0, 0.0)
    assert fleet.leave("b") == slot
    assert not fleet.eligible("")[slot]
    assert fleet.join("c") == slot
    assert fleet.in_flight(slot) == 0
    assert fleet.load_tokens()[slot] == 0
    with pytest.raises(ValueError, match="already in the fleet"):
        fleet.join("a")


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["send", "token", "land"]), st.integers(0, 9)), max_size=60))
def test_every_flight_counts_exactly_once(steps: list[tuple[str, int]]) -> None:
    fleet = Fleet()
    for i in range(3):
        fleet.join(str(i))
    out: list[Flight] = []
    for now, (step, pick) in enumerate(steps):
        if step == "send":
            out.append(fleet.dispatch(pick % 3, 100 + pick, pick, float(now)))
        elif out and step == "token":
            fleet.first_token(out[pick % len(out)], float(now))
        elif out:
            fleet.land(out.pop(pick % len(out)), float(now))
        for slot in range(3):
            here = [flight for flight in out if flight.worker == slot]
            waiting = [flight for flight in here if flight.first_token_at is None]
            assert fleet.in_flight(slot) == len(here)
            assert fleet.queued_tokens[slot] == sum(flight.uncached_tokens for flight in waiting)
            assert fleet.in_flight_tokens[slot] == sum(flight.num_tokens for flight in here)


def test_the_prefill_rate_is_learned_from_first_tokens() -> None:
    fleet = Fleet()
    slot = fleet.join("a", prefill_rate=8_000.0)
    for i in range(200):
        flight = fleet.dispatch(slot, 2_000, 0, i * 1.0)
        fleet.first_token(flight, i * 1.0 + 2_000 / 1_000.0 / 4)
        fleet.land(flight, i + 0.9)
    assert fleet.prefill_rate[slot] == pytest.approx(4_000, rel=0.05)


def test_queued_prefills_are_not_measured_twice() -> None:
    """Four prompts sent at once and served one after another in 0.5 s each: 4,000 tokens a second, not 1,600."""
    fleet = Fleet()
    slot = fleet.join("a")
    for round_ in range(100):
        start = round_ * 2.0
        flights = [fleet.dispatch(slot, 2_000, 0, start) for _ in range(4)]
        for i, flight in enumerate(flights):
            fleet.first_token(flight, start + 0.5 * (i + 1))
            fleet.land(flight, start + 0.5 * (i + 1))
    assert fleet.prefill_rate[slot] == pytest.approx(4_000, rel=0.05)


def test_how_long_a_token_stays_is_known_from_those_that_have_landed() -> None:
    fleet = Fleet()
    slot = fleet.join("a")
    assert fleet.stay_seconds == 0
    for _ in range(2_000):
        short, long = fleet.dispatch(slot, 100, 0, 0.0), fleet.dispatch(slot, 900, 0, 0.0)
        fleet.land(short, 1.0)
        fleet.land(long, 11.0)
    assert fleet.stay_seconds == pytest.approx(10.0, rel=0.02)


def test_what_others_sent_counts_as_load() -> None:
    fleet = Fleet()
    a, b = fleet.join("a"), fleet.join("b")
    fleet.dispatch(a, 10, 0, 0.0)
    fleet.report(a, LoadReport(running=1.0, waiting=0.0))
    fleet.report(b, LoadReport(running=5.0, waiting=2.0))
    assert fleet.foreign_requests[a] == 0
    assert fleet.foreign_requests[b] == 7
    assert fleet.load_tokens()[b] > fleet.load_tokens()[a]


def test_models_limit_where_a_request_may_go() -> None:
    fleet = Fleet()
    a, b, c = fleet.join("a"), fleet.join("b"), fleet.join("c")
    fleet.set_models(a, frozenset({"llama"}))
    fleet.set_models(b, frozenset({"qwen"}))
    assert fleet.eligible("llama").nonzero()[0].tolist() == [a, c]
    assert fleet.eligible("nobody-has-it").nonzero()[0].tolist() == [a, b, c]
    fleet.set_available(c, False)
    assert fleet.eligible("llama").nonzero()[0].tolist() == [a]
