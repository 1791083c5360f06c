"""Hit rates by routing policy, on a real trace: pooled, split, and everything between."""

from __future__ import annotations

from pathlib import Path

import pytest

from caudex.routing import make_policy
from caudex.simulate import SequentialResult, Workload, read_workload, replay_sequentially

TRACE = Path(__file__).parents[1] / "cache" / "data" / "mooncake_conversation.head.jsonl.gz"


@pytest.fixture(scope="module")
def workload() -> Workload:
    return read_workload(TRACE)


def hits_of_a_plain_cache(workload: Workload, num_blocks: int, every: int, start: int) -> int:
    """LRU over blocks, tail first, for every `every`-th request: what one replica under round robin sees."""
    cache: dict[int, None] = {}
    hits = 0
    for path, length in list(zip(map(workload.path, range(len(workload))), workload.input_lengths, strict=True))[
        start::every
    ]:
        ids = path.tolist()[:num_blocks]
        limit = min(len(ids), (int(length) - 1) // workload.block_size)
        hits += next((i for i in range(limit) if ids[i] not in cache), limit) * workload.block_size
        for block in reversed(ids):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > num_blocks:
            del cache[next(iter(cache))]
    return hits


def replay(workload: Workload, policy: str, num_replicas: int, num_blocks: int) -> SequentialResult:
    """With LRU, which the plain cache above does, and which is what `prefix` and `cost` believe of a replica."""
    settings = {"num_replicas": num_replicas, "num_blocks": num_blocks}
    return replay_sequentially(workload, make_policy(policy), eviction="lru", **settings)


@pytest.mark.parametrize("num_blocks", [300, 1_000])
def test_one_replica_and_round_robin_equal_a_plain_replay(workload: Workload, num_blocks: int) -> None:
    total = int(workload.input_lengths.sum())
    pooled = replay(workload, "cost", 1, num_blocks)
    assert pooled.hit_rate == pytest.approx(hits_of_a_plain_cache(workload, num_blocks, 1, 0) / total)
    split = replay(workload, "round_robin", 4, num_blocks)
    expected = sum(hits_of_a_plain_cache(workload, num_blocks, 4, start) for start in range(4))
    assert split.hit_rate == pytest.approx(expected / total)


def test_policies_that_look_at_prefixes_keep_the_pooled_hit_rate_without_a_hot_spot(workload: Workload) -> None:
    pooled = replay(workload, "cost", 1, 4_000).hit_rate
    assert replay(workload, "round_robin", 4, 1_000).hit_rate < 0.6 * pooled
    for name in ("prefix", "cost"):
        result = replay(workload, name, 4, 1_000)
        assert result.hit_rate > 0.85 * pooled
        assert result.imbalance < 1.1
