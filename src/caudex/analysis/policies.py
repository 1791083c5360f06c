"""Eviction policies on a log, through the cache's own replay."""

from __future__ import annotations

from collections.abc import Sequence

from caudex.cache import policy_names
from caudex.cache.block_trace import BlockTrace
from caudex.cache.replay import ReplaySettings, replay

LRU, CLAIRVOYANT = "lru", "clairvoyant"


DEFAULT_POLICIES = (LRU, "fifo", "lfu", "arc", "s3fifo", "gittins")
"""Compared unless others are named: the classics, and the two that are best on real traces."""


def default_policies() -> list[str]:
    """DEFAULT_POLICIES, as far as the cache has them."""
    known = policy_names()
    return [policy for policy in DEFAULT_POLICIES if policy in known]


def check_policies(policies: Sequence[str]) -> list[str]:
    """`policies` without repeats. Raises ValueError that names an unknown one and lists the known."""
    known = [*policy_names(), CLAIRVOYANT]
    for policy in policies:
        if policy not in known:
            raise ValueError(f"policy is {policy!r}; known are {', '.join(known)}")
    return list(dict.fromkeys(policies))


def policy_hit_rates(
    trace: BlockTrace,
    policies: Sequence[str],
    capacities: Sequence[int],
) -> dict[tuple[str, int], float]:
    """Hit rates by (policy, capacity): the log run through the real cache, once for each, several at a time.

    LRU and the clairvoyant bound are left out; one exact pass gives those at every capacity. Capacities of no block
    serve nothing and are not run.
    """
    wanted = [policy for policy in policies if policy not in {LRU, CLAIRVOYANT}]
    rates = {(policy, capacity): 0.0 for policy in wanted for capacity in capacities}
    for policy in wanted:  # one at a time, since a result has an entry for each request
        for result in replay(trace, [ReplaySettings(capacity, policy) for capacity in capacities if capacity > 0]):
            rates[policy, result.settings.num_blocks] = result.hit_rate
    return rates
