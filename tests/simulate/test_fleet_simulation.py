from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.simulate import (
    FittedModel,
    FleetChange,
    FleetSimulation,
    ReplicaLimits,
    RooflineModel,
    SimulationResult,
    SimulationSettings,
    Slo,
    Workload,
    find_gpu,
    find_model,
    read_workload,
)

TRACE = Path(__file__).parents[1] / "cache" / "data" / "mooncake_conversation.head.jsonl.gz"
STEADY = FittedModel(0.01, 1e-4, 0.0, 1e-3, 1e-6)
"""10 ms a step, 0.1 ms a prompt token, 1 ms a running request, 1 us a token of context."""


def workload_of(requests: list[tuple[float, list[int], int, int]], block_size: int = 16) -> Workload:
    """Requests as (arrival, block ids, input length, output length)."""
    arrivals, paths, inputs, outputs = zip(*requests, strict=True)
    return Workload(
        [np.array(path, dtype=np.int32) for path in paths],
        np.array(arrivals, dtype=np.float64),
        np.array(inputs, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
        block_size,
        [None] * len(requests),
    )


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
    rows = []
    for arrival, path, rest, output in sorted(raw, key=lambda row: row[0]):
        chained = [int.from_bytes(bytes(path[: i + 1]), "big") % 2**30 for i in range(len(path))]
        rows.append((arrival, chained, max(1, 16 * len(path) + rest), output))
    workload = workload_of(rows)
    changes = [FleetChange(time, "join" if join else "kill", number + 1) for time, number, join in kills]
    result = simulate(workload, replicas=replicas, num_blocks=12, policy=policy, changes=changes)
    fits = (workload.input_lengths + workload.output_lengths + 15) // 16 <= 12
    finished = ~np.isnan(result.finishes)
    assert finished.tolist() == fits.tolist()
    assert (result.ttft[finished] > 0).all()
    assert (result.finishes[finished] >= result.first_tokens[finished]).all()
    assert (result.cached_tokens < result.input_lengths).all()
    computed = (result.input_lengths - result.cached_tokens)[finished].sum()
    assert result.computed_by_replica.sum() >= computed
    if not any(change.kind == "kill" for change in changes):
        assert result.computed_by_replica.sum() == computed


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
