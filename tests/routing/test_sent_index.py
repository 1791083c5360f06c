"""What is believed of a worker, from what it was sent, against what its cache really held: honest feedback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from caudex.cache import PrefixCache
from caudex.routing import Fleet, HonestyCheck, LoadReport, RouteRequest, token_request
from caudex.routing.sent_index import SentIndex

BLOCK = 16
NUM_BLOCKS = 1_200


def prompts(seed: int, count: int) -> Iterator[NDArray[np.int32]]:
    """Turns of conversations, popular ones more often, and a third of prompts that never come again."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 30_000, 160, dtype=np.int32)
    talks = [system] * 60
    for _ in range(count):
        if rng.random() < 0.3:
            yield np.concatenate([system, rng.integers(0, 30_000, 600, dtype=np.int32)])
            continue
        talk = min(int(rng.zipf(1.3)) - 1, len(talks) - 1)
        talks[talk] = np.concatenate([talks[talk], rng.integers(0, 30_000, 90, dtype=np.int32)])
        if len(talks[talk]) > 3_000:
            talks[talk] = system
        yield talks[talk]


def serve(cache: PrefixCache, prompt: NDArray[np.int32]) -> int:
    """Runs a prompt and sixty generated tokens through a worker's cache; the tokens that it found there."""
    sequence = cache.begin(prompt)
    cached = sequence.num_cached_tokens
    sequence.append(np.arange(60, dtype=np.int32) + 40_000)
    sequence.allocate(len(prompt) + 60)
    sequence.commit(len(prompt) + 60)
    sequence.release()
    return cached


@dataclass
class Belief:
    predicted: float = 0.0
    reported: float = 0.0
    error: float = 0.0
    drops: int = 0


def watch(cache: PrefixCache, *, told_tokens: float, seed: int = 0, count: int = 600) -> Belief:
    """One worker that says it has `told_tokens` slots, and whose index is dropped as the gateway drops it."""
    fleet, index, check, belief = Fleet(), SentIndex(), HonestyCheck(), Belief()
    slot = fleet.join("worker")
    fleet.report(slot, LoadReport(capacity_tokens=told_tokens))
    for now, prompt in enumerate(prompts(seed, count)):
        request: RouteRequest = token_request(prompt, block_size=BLOCK)
        predicted = int(index.cached_tokens(request, fleet)[slot])
        index.record(request, slot, float(now))
        cache.set_time(float(now))
        reported = serve(cache, prompt)
        belief.predicted += predicted
        belief.reported += reported
        belief.error += abs(predicted - reported)
        if check.observe(slot, predicted, reported):
            belief.drops += 1
            index.forget(slot)
            check.forget(slot)
    return belief


@pytest.mark.parametrize("policy", ["lru", "gittins", "slru", "s3fifo"])
@pytest.mark.parametrize("seed", [0, 1])
def test_workers_that_evict_by_other_rules_are_known_well_enough(policy: str, seed: int) -> None:
    cache = PrefixCache(NUM_BLOCKS, BLOCK, policy=policy, manual_clock=True)
    belief = watch(cache, told_tokens=NUM_BLOCKS * BLOCK, seed=seed)
    assert belief.drops == 0
    assert belief.error < 0.2 * belief.reported


def test_a_worker_with_whole_blocks_only_is_known_too() -> None:
    cache = PrefixCache(NUM_BLOCKS, BLOCK, index="hash", policy="lru", manual_clock=True)
    belief = watch(cache, told_tokens=NUM_BLOCKS * BLOCK)
    assert belief.drops == 0
    assert belief.error < 0.2 * belief.reported


@pytest.mark.parametrize(("policy", "share"), [("lru", 1 / 6), ("gittins", 1 / 6), ("lfu", 1.0)])
def test_a_worker_that_holds_far_less_than_is_believed_is_found_out(policy: str, share: float) -> None:
    """One that says it has more room than it has, or that keeps what is old whatever is asked for (LFU)."""
    cache = PrefixCache(int(NUM_BLOCKS * share), BLOCK, policy=policy, manual_clock=True)
    assert watch(cache, told_tokens=NUM_BLOCKS * BLOCK, count=1_200).drops > 0
