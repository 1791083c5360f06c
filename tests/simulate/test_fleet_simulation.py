from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulate.workloads import workload_of

from caudex.simulate import (
    FittedModel,
    FleetChange,
    FleetSimulation,
    ReplicaLimits,
    RooflineModel,
    SimulationResult,
    SimulationSettings,
    Slo,
    StepWork,
    Workload,
    find_gpu,
    find_model,
    read_workload,
)

TRACE = Path(__file__).parents[1] / "cache" / "data" / "mooncake_conversation.head.jsonl.gz"
STEADY = FittedModel(0.01, 1e-4, 0.0, 1e-3, 1e-6)
"""10 ms a step, 0.1 ms a prompt token, 1 ms a running request, 1 us a token of context."""


def simulate(workload: Workload, *, replicas: int = 1, num_blocks: int = 1_000, **options: object) -> SimulationResult:
    limits = ReplicaLimits(num_blocks, workload.block_size)
    return FleetSimulation(workload, SimulationSettings(replicas, limits, **options), STEADY).run()  # type: ignore[arg-type]


def test_one_request_takes_what_its_steps_take() -> None:
    result = simulate(workload_of([(5.0, [0, 1], 32, 4)]))
    prefill = 0.01 + 32e-4
    decodes = sum(0.01 + 1e-3 + (32 + 1 + i) * 1e-6 for i in range(3))
    assert result.ttft[0] == pytest.approx(prefill)
    assert result.finishes[0] == pytest.approx(5.0 + prefill + decodes)
    assert result.tpot[0] == pytest.approx(decodes / 3)


def test_a_second_request_hits_what_the_first_left() -> None:
    result = simulate(workload_of([(0.0, [0, 1, 2], 48, 2), (10.0, [0, 1, 3], 50, 2)]))
    assert result.cached_tokens.tolist() == [0, 32]
    assert result.computed_by_replica.tolist() == [48 + 18]


@pytest.mark.parametrize("num_requests", [2, 3, 7])
def test_what_requests_share_is_read_once(num_requests: int) -> None:
    """The first begins a step before the others, which hit 48 of its tokens; then all decode side by side."""
    model = FittedModel(0.01, 1e-4, 0.0, 0.0, 0.0, seconds_per_distinct_token=1e-3)
    rows = [(0.0, [0, 1, 2, 10 + i], 64, 5 if i else 6) for i in range(num_requests)]
    result = FleetSimulation(workload_of(rows), SimulationSettings(1, ReplicaLimits(100, 16)), model).run()
    contexts = (48 + num_requests * (16 + 1 + i) + 1 for i in range(4))
    assert len(set(result.finishes.tolist())) == 1
    assert result.finishes[-1] - result.first_tokens[-1] == pytest.approx(sum(0.01 + c * 1e-3 for c in contexts))


def test_steps_taken_together_equal_steps_taken_one_by_one() -> None:
    """A request that comes in the middle of a long decode begins at the end of the step under way."""
    result = simulate(workload_of([(0.0, [0], 16, 100), (0.5, [1], 16, 1)]))
    clock, context, tokens = 0.01 + 16e-4, 17, 1
    first_end = None
    second_at = None
    while tokens < 100:
        begins = clock
        extra = 16e-4 if second_at is None and begins >= 0.5 else 0.0
        clock += 0.01 + 1e-3 + context * 1e-6 + extra
        if extra:
            second_at = clock
        context += 1
        tokens += 1
    first_end = clock
    assert result.first_tokens[1] == pytest.approx(second_at)
    assert result.finishes[0] == pytest.approx(first_end)


requests = st.lists(
    st.tuples(st.floats(0, 20), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 15), st.integers(1, 30)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(
    raw=requests,
    replicas=st.integers(1, 4),
    policy=st.sampled_from(["random", "round_robin", "least_loaded", "session", "prefix", "cost", "consistent_hash"]),
    kills=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 3), st.booleans()), max_size=3),
)
def test_every_request_ends_once_and_the_sums_close(
    raw: list[tuple[float, list[int], int, int]], replicas: int, policy: str, kills: list[tuple[float, int, bool]]
) -> None:
    rows, dense = [], {}
    for arrival, path, rest, output in sorted(raw, key=lambda row: row[0]):
        chained = [dense.setdefault(tuple(path[: i + 1]), len(dense)) for i in range(len(path))]
        rows.append((arrival, chained, max(1, 16 * len(path) + rest), output))
    workload = workload_of(rows)
    changes = [FleetChange(time, "join" if join else "kill", number + 1) for time, number, join in kills]
    result = simulate(workload, replicas=replicas, num_blocks=12, policy=policy, changes=changes)
    fits = (workload.input_lengths + workload.output_lengths + 15) // 16 <= 12
    finished = ~np.isnan(result.finishes)
    assert finished.tolist() == fits.tolist()
    assert (finished ^ result.refused).all()
    assert (result.ttft[finished] > 0).all()
    assert (result.finishes[finished] >= result.first_tokens[finished]).all()
    assert (result.cached_tokens < result.input_lengths).all()
    computed = (result.input_lengths - result.cached_tokens)[finished].sum()
    lost = result.computed_by_replica.sum() - computed
    assert lost >= 0
    if not any(change.kind == "kill" for change in changes):
        assert lost == 0
    summary = result.summary(Slo())
    assert summary["finished"] + summary["refused"] == summary["requests"] == len(rows)
    assert summary["unfinished"] == 0


def test_a_run_that_is_broken_off_tells_what_has_become_of_whom() -> None:
    workload = read_workload(TRACE, limit=300)
    limits = ReplicaLimits(2_000, workload.block_size)
    simulation = FleetSimulation(workload, SimulationSettings(2, limits), STEADY)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulation.run(stop)
    summary = simulation.result().summary(Slo())
    assert (summary["requests"], summary["finished"], summary["unfinished"]) == (1, 0, 1)


def test_what_a_dead_replica_had_is_computed_again() -> None:
    """It dies half-way through a prompt of two chunks, whose first chunk is lost with it."""
    workload = workload_of([(0.0, list(range(1_000)), 16_000, 2)])
    chunk = 0.01 + 8_192e-4
    result = simulate(workload, replicas=2, num_blocks=1_100, changes=[FleetChange(1.5 * chunk, "kill", 0)], seed=3)
    again = simulate(workload, replicas=2, num_blocks=1_100, changes=[FleetChange(1.5 * chunk, "kill", 1)], seed=3)
    died, other = (result, again) if result.retries[0] else (again, result)
    assert died.computed_by_replica.sum() == 16_000 + 8_192
    assert other.computed_by_replica.sum() == 16_000
    assert died.ttft[0] == pytest.approx(1.5 * chunk + other.ttft[0])


def test_what_a_death_costs_is_told_by_what_came_before_and_after() -> None:
    """The third request would have hit two blocks of a cache that is gone; the fourth is outside the window."""
    workload = workload_of([(i * 10.0, [0, 1, 10 + i], 48, 2) for i in range(4)])
    changes = [FleetChange(15.0, "kill", 0), FleetChange(15.0, "join", 0)]
    around = simulate(workload, changes=changes).around(15.0, 15.0, Slo())
    before, after = around["before"], around["after"]
    assert (before["requests"], before["hit_rate"], before["recomputed_tokens"]) == (2, 32 / 96, 0)
    assert (after["requests"], after["hit_rate"], after["recomputed_tokens"]) == (1, 0.0, 32)
    assert after["ttft"]["mean"] == pytest.approx(0.01 + 48e-4)
    assert before["ttft"]["mean"] == pytest.approx(0.01 + (48 + 16) / 2 * 1e-4)
    assert simulate(workload, changes=changes).window(100.0, 200.0, Slo())["hit_rate"] is None


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 40_000), policy=st.sampled_from(["random", "session", "cost"]))
def test_without_load_the_first_token_comes_when_the_cost_model_says(length: int, policy: str) -> None:
    model = FittedModel(0.01, 1e-4, 3e-9, 1e-3, 1e-6, seconds_per_request=0.002, seconds_per_prompt_token=1e-6)
    workload = workload_of([(0.0, list(range(length // 16)), length, 1)])
    limits = ReplicaLimits(4_000, 16)
    result = FleetSimulation(workload, SimulationSettings(5, limits, policy), model).run()
    starts = range(0, length, limits.max_num_batched_tokens)
    chunks = [(start, min(limits.max_num_batched_tokens, length - start)) for start in starts]
    steps = [model.step_seconds(StepWork(n, sum(range(start + 1, start + n + 1)), 0, 0, 0)) for start, n in chunks]
    assert result.ttft[0] == pytest.approx(model.front_seconds(length) + sum(steps))


@pytest.mark.parametrize("policy", ["random", "consistent_hash", "prefix", "cost"])
def test_more_replicas_do_not_lower_goodput(policy: str) -> None:
    workload = read_workload(TRACE, limit=800).faster(5.0)
    cost = RooflineModel(find_model("Llama-3.1-8B"), find_gpu("H100"))
    limits = ReplicaLimits(300, workload.block_size)
    shares = [
        FleetSimulation(workload, SimulationSettings(n, limits, policy), cost).run().summary(Slo())["slo_share"]
        for n in (2, 4, 8, 16)
    ]
    assert all(more >= fewer - 0.02 for fewer, more in itertools.pairwise(shares))
    assert shares[-1] > shares[0]


def test_a_workload_must_have_the_block_size_of_the_replicas() -> None:
    workload = workload_of([(0.0, [0], 16, 1)])
    with pytest.raises(ValueError, match="block size is 512, the workload's 16"):
        FleetSimulation(workload, SimulationSettings(1, ReplicaLimits(10, 512)), STEADY)
    with pytest.raises(ValueError, match="0 replicas"):
        SimulationSettings(0, ReplicaLimits(10, 16))
    with pytest.raises(ValueError, match="num_blocks is 0"):
        ReplicaLimits(0, 16)


def test_infinite_cache_hits_are_those_of_a_plain_set() -> None:
    workload = read_workload(TRACE, limit=500)
    seen: set[int] = set()
    for i in range(len(workload)):
        ids = workload.path(i).tolist()
        limit = min(len(ids), (int(workload.input_lengths[i]) - 1) // workload.block_size)
        matched = next((k for k in range(limit) if ids[k] not in seen), limit)
        assert workload.infinite_cache_hits[i] == matched * workload.block_size
        seen.update(ids)


def test_the_same_seed_gives_the_same_result_to_the_bit() -> None:
    workload = read_workload(TRACE, limit=400)
    cost = RooflineModel(find_model("Llama-3.1-8B"), find_gpu("H100"))
    changes = (FleetChange(20.0, "kill", 1), FleetChange(60.0, "join", 1))

    def run(seed: int) -> dict[str, object]:
        limits = ReplicaLimits(900, workload.block_size)
        plan = SimulationSettings(3, limits, "cost", seed=seed, changes=changes)
        return FleetSimulation(workload, plan, cost).run().summary(Slo())

    assert run(1) == run(1)


def test_cost_beats_round_robin_on_a_real_trace() -> None:
    workload = read_workload(TRACE)
    cost = RooflineModel(find_model("Llama-3.1-8B"), find_gpu("H200"))
    limits = ReplicaLimits(cost.kv_capacity_tokens() // workload.block_size, workload.block_size)
    figures = {
        name: FleetSimulation(workload, SimulationSettings(4, limits, name), cost).run().summary(Slo())
        for name in ("round_robin", "cost")
    }
    assert figures["cost"]["hit_rate"] > 1.5 * figures["round_robin"]["hit_rate"]
    assert figures["cost"]["ttft"]["mean"] < figures["round_robin"]["ttft"]["mean"]
    assert figures["cost"]["imbalance"] < 1.2


def test_kv_capacity_and_sizes() -> None:
    assert find_model("Llama-3.1-8B").kv_bytes_per_token == 131_072
    with pytest.raises(ValueError, match="weights alone"):
        RooflineModel(find_model("Llama-3.1-70B"), find_gpu("H100")).kv_capacity_tokens()
    with pytest.raises(ValueError, match="H100"):
        find_gpu("H99")
