"""Properties that every policy keeps, and the faults that none may have."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.routing import POLICIES, Fleet, LoadReport, Policy, Reason, RouteRequest, make_policy, text_request
from caudex.routing.consistent_hash import ConsistentHashPolicy
from caudex.routing.cost import CostPolicy
from caudex.routing.session import SessionPolicy

LOOKS_AT_PREFIXES = ["prefix", "cost"]


def fleet_of(num_workers: int) -> Fleet:
    fleet = Fleet()
    for i in range(num_workers):
        fleet.join(f"http://worker-{i}:8000")
    return fleet


def unique_text(seed: int, num_bytes: int = 4_000) -> bytes:
    return np.random.default_rng(seed).integers(97, 123, num_bytes, dtype=np.uint8).tobytes()


def chosen(policy: Policy, fleet: Fleet, request: RouteRequest) -> int:
    best = policy.rank(request, fleet, 0.0).best
    assert best is not None
    return best.worker


def send(policy: Policy, fleet: Fleet, request: RouteRequest, now: float) -> int:
    """Routes one request and lets it finish at once."""
    best = policy.rank(request, fleet, now).best
    assert best is not None
    policy.record(request, best.worker, now)
    flight = fleet.dispatch(best.worker, request.num_tokens, best.cached_tokens or 0, now)
    fleet.first_token(flight, now)
    fleet.land(flight, now)
    return best.worker


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_ranking_holds_every_eligible_worker_once(name: str, data: st.DataObject) -> None:
    num_workers = data.draw(st.integers(1, 12))
    fleet = fleet_of(num_workers)
    available = data.draw(st.lists(st.booleans(), min_size=num_workers, max_size=num_workers))
    for slot, is_available in enumerate(available):
        fleet.set_available(slot, is_available)
        for _ in range(data.draw(st.integers(0, 3))):
            fleet.dispatch(slot, 500, 0, 0.0)
    policy = make_policy(name)
    ranking = policy.rank(text_request(unique_text(0), session="s"), fleet, 0.0)
    ranked = [candidate.worker for candidate in ranking]
    assert sorted(ranked) == [slot for slot, is_available in enumerate(available) if is_available]
    assert (ranking.best is None) == (not any(available))
    if ranking.best is not None:
        assert ranking.best.worker == ranked[0]


@pytest.mark.parametrize("name", POLICIES)
def test_forty_cold_prompts_do_not_go_to_one_worker(name: str) -> None:
    fleet, policy = fleet_of(4), make_policy(name)
    counts = Counter(send(policy, fleet, text_request(unique_text(i)), float(i)) for i in range(40))
    assert len(counts) == 4
    assert max(counts.values()) <= 20


@pytest.mark.parametrize("name", ["random", "least_loaded", "session", "prefix", "cost", "prefix_exact"])
def test_equal_workers_are_not_taken_in_list_order(name: str) -> None:
    first = Counter(
        send(make_policy(name, seed=seed), fleet_of(4), text_request(unique_text(seed)), 0.0) for seed in range(40)
    )
    assert max(first.values()) < 25


@pytest.mark.parametrize("name", LOOKS_AT_PREFIXES)
def test_a_common_system_prompt_does_not_send_everyone_to_one_worker(name: str) -> None:
    fleet, policy = fleet_of(4), make_policy(name)
    system = unique_text(999, 4_000)
    counts: Counter[int] = Counter()
    for i in range(80):
        request = text_request(system + unique_text(i, 2_000))
        best = policy.rank(request, fleet, 0.1 * i).best
        assert best is not None
        policy.record(request, best.worker, 0.1 * i)
        fleet.dispatch(best.worker, request.num_tokens, best.cached_tokens or 0, 0.1 * i)
        counts[best.worker] += 1
    assert len(counts) == 4
    assert max(counts.values()) <= 2 * 80 / 4


@pytest.mark.parametrize("name", LOOKS_AT_PREFIXES)
def test_turns_of_a_conversation_follow_their_history(name: str) -> None:
    fleet, policy = fleet_of(8), make_policy(name)
    for i in range(30):
        send(policy, fleet, text_request(unique_text(100 + i)), float(i))
    history = unique_text(0)
    home = send(policy, fleet, text_request(history), 30.0)
    for turn in range(5):
        history += unique_text(turn + 1, 500)
        ranking = policy.rank(text_request(history), fleet, 31.0 + turn)
        assert ranking.best is not None
        assert ranking.best.worker == home
        assert ranking.best.reason is Reason.PREFIX
        assert ranking.best.cached_tokens is not None
        assert ranking.best.cached_tokens >= 900
        send(policy, fleet, text_request(history), 31.0 + turn)


@pytest.mark.parametrize("name", LOOKS_AT_PREFIXES)
def test_prompts_that_differ_after_many_blocks_are_told_apart(name: str) -> None:
    fleet, policy = fleet_of(2), make_policy(name)
    head = unique_text(1, 64 * 2_000)
    left, right = text_request(head + unique_text(2)), text_request(head + unique_text(3))
    policy.record(left, 0, 0.0)
    policy.record(right, 1, 0.0)
    cached = {candidate.worker: candidate.cached_tokens for candidate in policy.rank(right, fleet, 0.0)}
    assert cached[0] == 32_000
    assert cached[1] is not None
    assert cached[1] > 32_900


@pytest.mark.parametrize("name", LOOKS_AT_PREFIXES)
def test_another_salt_is_another_prefix(name: str) -> None:
    fleet, policy = fleet_of(3), make_policy(name)
    text = unique_text(0)
    policy.record(text_request(text, salt="alice"), 0, 0.0)
    for salt, expected in (("alice", 900), ("bob", 0), ("", 0)):
        cached = {c.worker: c.cached_tokens for c in policy.rank(text_request(text, salt=salt), fleet, 0.0)}
        assert cached[0] is not None
        assert (cached[0] >= expected) if expected else cached[0] == 0


@pytest.mark.parametrize("name", ["least_loaded", "session", "prefix", "cost", "consistent_hash"])
def test_load_counts_prompt_lengths(name: str) -> None:
    """One worker has a single prompt of 50,000 tokens, the other five of 100: the next goes to the second."""
    chosen = []
    for seed in range(20):
        fleet, policy = fleet_of(2), make_policy(name, seed=seed)
        fleet.dispatch(0, 50_000, 0, 0.0)
        for _ in range(5):
            fleet.dispatch(1, 100, 0, 0.0)
        best = policy.rank(text_request(unique_text(seed)), fleet, 0.0).best
        assert best is not None
        chosen.append(best.worker)
    assert set(chosen) == {1}


@pytest.mark.parametrize("name", LOOKS_AT_PREFIXES)
def test_a_forgotten_worker_is_no_longer_credited(name: str) -> None:
    fleet, policy = fleet_of(3), make_policy(name)
    request = text_request(unique_text(0))
    policy.record(request, 1, 0.0)
    policy.forget(1)
    assert all(candidate.cached_tokens == 0 for candidate in policy.rank(request, fleet, 1.0))


@settings(max_examples=20, deadline=None)
@given(num_workers=st.integers(2, 20), leaver=st.integers(0, 19))
def test_consistent_hash_moves_only_what_must_move(num_workers: int, leaver: int) -> None:
    leaver %= num_workers
    fleet, policy = fleet_of(num_workers), ConsistentHashPolicy()
    requests = [text_request(unique_text(i, 128)) for i in range(300)]
    before = [policy.rank(request, fleet, 0.0).best for request in requests]
    fleet.leave(f"http://worker-{leaver}:8000")
    after = [policy.rank(request, fleet, 0.0).best for request in requests]
    moved = 0
    for old, new in zip(before, after, strict=True):
        assert old is not None
        assert new is not None or num_workers == 1
        if old.worker == leaver:
            moved += 1
        else:
            assert new is not None
            assert new.worker == old.worker
    expected = len(requests) / num_workers
    assert moved <= expected + 5 * expected**0.5
    fleet.join(f"http://worker-{leaver}:8000")
    returned = [policy.rank(request, fleet, 0.0).best for request in requests]
    assert [c and c.worker for c in returned] == [c and c.worker for c in before]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(64, 40_000), min_size=1, max_size=80),
    num_workers=st.integers(1, 9),
    factor=st.sampled_from([1.05, 1.25, 2.0]),
)
def test_consistent_hash_bounds_the_load(sizes: list[int], num_workers: int, factor: float) -> None:
    fleet, policy = fleet_of(num_workers), ConsistentHashPolicy(load_factor=factor)
    same_prefix = unique_text(0, 64)
    for size in sizes:
        request = text_request(same_prefix.ljust(size, b"x"))
        best = policy.rank(request, fleet, 0.0).best
        assert best is not None
        fleet.dispatch(best.worker, request.num_tokens, 0, 0.0)
        assert fleet.in_flight_tokens[best.worker] <= factor * fleet.in_flight_tokens.mean() + request.num_tokens


def test_a_session_stays_and_is_rebound_when_its_worker_goes() -> None:
    fleet, policy = fleet_of(4), make_policy("session")
    request = text_request(b"hello", session="s")
    home = send(policy, fleet, request, 0.0)
    for now in range(1, 20):
        ranking = policy.rank(request, fleet, float(now))
        assert ranking.best is not None
        assert (ranking.best.worker, ranking.best.reason) == (home, Reason.SESSION)
    fleet.set_available(home, False)
    second = send(policy, fleet, request, 20.0)
    assert second != home
    fleet.set_available(home, True)
    assert send(policy, fleet, request, 21.0) == second


def test_sessions_of_tenants_are_apart_and_bounded() -> None:
    fleet, policy = fleet_of(2), SessionPolicy(max_sessions=10)
    policy.record(text_request(b"x", session="s", tenant="a"), 0, 0.0)
    best = policy.rank(text_request(b"x", session="s", tenant="b"), fleet, 0.0).best
    assert best is not None
    assert best.reason is Reason.LOAD
    for i in range(100):
        policy.record(text_request(b"x", session=str(i)), 0, 0.0)
    assert len(policy) == 10


@pytest.mark.parametrize("name", ["session", "prefix", "cost"])
def test_a_snapshot_keeps_where_things_are(name: str) -> None:
    fleet, policy, other = fleet_of(6), make_policy(name), make_policy(name, seed=5)
    requests = [text_request(unique_text(i), session=str(i)) for i in range(20)]
    homes = [send(policy, fleet, request, float(i)) for i, request in enumerate(requests)]
    other.load(policy.dump())
    idle = fleet_of(6)
    for request, home in zip(requests, homes, strict=True):
        best = other.rank(request, idle, 100.0).best
        assert best is not None
        assert best.worker == home
    with pytest.raises(ValueError, match=r"snapshot|state"):
        other.load(b"\xc1nonsense")


def test_a_hot_prefix_is_replicated_when_its_worker_is_the_bottleneck() -> None:
    fleet, policy = fleet_of(3), CostPolicy()
    request = text_request(unique_text(0, 8_000))
    policy.record(request, 0, 0.0)
    assert chosen(policy, fleet, request) == 0
    for _ in range(3):
        fleet.dispatch(0, 2_000, 0, 0.0)
    best = policy.rank(request, fleet, 0.0).best
    assert best is not None
    assert best.worker != 0
    assert best.reason is Reason.REPLICATE


def test_cost_prefers_the_faster_worker_and_the_one_that_evicts_less() -> None:
    fleet = fleet_of(2)
    fleet.prefill_rate[1] = 20_000.0
    assert chosen(CostPolicy(), fleet, text_request(unique_text(0))) == 1
    fleet, policy = fleet_of(2), CostPolicy()
    fleet.report(0, LoadReport(capacity_tokens=1_000.0))
    fleet.report(1, LoadReport(capacity_tokens=100_000.0))
    policy.rank(text_request(b""), fleet, 0.0)
    policy.record(text_request(unique_text(1)), 0, 0.0)
    policy.record(text_request(unique_text(2)), 1, 0.0)
    assert chosen(policy, fleet, text_request(unique_text(3))) == 1


def test_prompts_do_not_wait_for_memory_that_is_being_read_while_another_worker_has_room() -> None:
    """Both workers are idle but for what is read there; in the first it fills the memory, and it is not shared."""
    fleet, policy = fleet_of(2), CostPolicy()
    for slot in range(2):
        fleet.report(slot, LoadReport(capacity_tokens=50_000.0))
    for slot, num_bytes in ((0, 160_000), (1, 16_000)):
        request = text_request(unique_text(slot, num_bytes))
        policy.rank(request, fleet, 0.0)
        policy.record(request, slot, 0.0)
        fleet.prefill_done(fleet.dispatch(slot, request.num_tokens, 0, 0.0), 0.0)
    flight = fleet.dispatch(1, 1_000, 0, 0.0)
    fleet.prefill_done(flight, 0.0)
    fleet.land(flight, 20.0)
    fleet.prefill_done(fleet.dispatch(1, 1_000, 0, 20.0), 20.0)
    running_more_there = text_request(unique_text(9, 40_000))
    assert chosen(policy, fleet, running_more_there) == 1
    turn = text_request(unique_text(0, 160_000) + unique_text(9, 400))
    assert chosen(policy, fleet, turn) == 0


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_cost_is_the_documented_sum(data: st.DataObject) -> None:
    fleet, policy = fleet_of(4), CostPolicy(harm_weight=0.05, decode_tokens=64.0)
    for slot in range(4):
        fleet.prefill_rate[slot] = data.draw(st.floats(1_000, 50_000))
        for _ in range(data.draw(st.integers(0, 3))):
            flight = fleet.dispatch(slot, data.draw(st.integers(1, 9_000)), 0, 0.0)
            if data.draw(st.booleans()):
                fleet.prefill_done(flight, 0.0)
    request = text_request(unique_text(0))
    policy.record(request, 2, 0.0)
    fleet.stay_seconds = data.draw(st.floats(0, 30))
    fleet.capacity_tokens[:] = data.draw(st.floats(1_100, 9_000))
    rates, running = fleet.prefill_rate, fleet.running
    busy = fleet.recent_tokens(0.0) / rates / 30.0
    requests = float(fleet.recent_requests(0.0).sum()) / 30.0
    arrivals = requests / 4 / (1 - min(float(busy.mean()), 0.95))
    service = float(busy.sum()) / requests if requests else 0.0
    expected = []
    for slot in range(4):
        work = (request.num_tokens - (992 if slot == 2 else 0)) / rates[slot]
        taken, read = (8 / fleet.capacity_tokens[slot], 992) if slot == 2 else (1_000 / fleet.capacity_tokens[slot], 0)
        full = min(read / fleet.capacity_tokens[slot] + taken / 2, 0.95)
        wait = (fleet.queued_tokens[slot] + 64.0 * running[slot]) / rates[slot]
        wait += fleet.stay_seconds * taken * full / (1 - full)
        harm = work * arrivals * (wait + work / 2) + work * 0.05 * running[slot]
        utilisation = min(float(busy[slot]), 0.95)
        expected.append(wait + work + harm + 0.5 * utilisation / (1 - utilisation) * service)
    ranked = [candidate.worker for candidate in policy.rank(request, fleet, 0.0)]
    assert np.all(np.diff(np.array(expected)[ranked]) >= -1e-9)


def test_unknown_policies_and_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"nearest.*cost"):
        make_policy("nearest")
    with pytest.raises(ValueError, match="load_factor is 1"):
        make_policy("consistent_hash", load_factor=1)


@pytest.mark.parametrize("policy", ["cost", "prefix"])
def test_a_worker_that_was_tried_first_does_not_get_all_cold_prompts(policy: str) -> None:
    """It is measured, and found to be far faster than was assumed; the others are none the slower for that."""
    fleet, chosen, rng = Fleet(), make_policy(policy), random.Random(0)
    for name in ("a", "b", "c", "d"):
        fleet.join(name)
    counts: Counter[int] = Counter()
    for i in range(40):
        request = text_request(f"{i} ".encode() * rng.randrange(1_000, 20_000))
        best = chosen.rank(request, fleet, float(i)).best
        assert best is not None
        chosen.record(request, best.worker, float(i))
        flight = fleet.dispatch(best.worker, request.num_tokens, 0, float(i))
        fleet.first_token(flight, i + request.num_tokens / 50_000 * rng.uniform(0.9, 1.1))
        fleet.land(flight, i + 0.9)
        counts[best.worker] += 1
    assert max(counts.values()) <= 12
