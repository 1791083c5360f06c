"""A policy of your own: evict the shortest prompts first, the oldest among equals.

Run it: python examples/eviction_policy.py
"""

from __future__ import annotations

import random

from caudex.cache import EndedRequest, Policy, PrefixCache


class ShortestFirst(Policy):
    """Keeps long prefixes, which cost most to compute again: the leaf that ends earliest goes first."""

    def __init__(self) -> None:
        self.last_use: dict[int, int] = {}
        self.candidates: set[int] = set()

    def end_request(self, request: EndedRequest, path: list[int]) -> None:
        for node in path:
            self.last_use[node] = request.serial

    def offer(self, node: int) -> None:
        self.candidates.add(node)

    def withdraw(self, node: int) -> None:
        self.candidates.discard(node)

    def split(self, upper: int, lower: int) -> None:
        self.last_use[upper] = self.last_use.get(lower, 0)
        if lower in self.candidates:
            self.candidates.add(upper)

    def merge(self, upper: int, lower: int) -> bool:
        return self.last_use.get(upper) == self.last_use.get(lower)

    def victim(self) -> int:
        leaves = [node for node in self.candidates if self.nodes.is_leaf(node)]
        return min(leaves, key=lambda node: (self.nodes.end(node), self.last_use.get(node, 0)))


def hit_rate(policy: str | Policy) -> float:
    """Long documents asked about now and then, between many short prompts that never come back."""
    rng = random.Random(0)
    documents = [[rng.randrange(1000) for _ in range(600)] for _ in range(5)]
    cache = PrefixCache(300, policy=policy)
    for _ in range(2000):
        prompt = [rng.randrange(1000) for _ in range(40)]
        if rng.random() < 0.03:
            prompt = rng.choice(documents) + prompt
        seq = cache.begin(prompt)
        seq.allocate(len(prompt))
        seq.commit(len(prompt))
        seq.release()
    stats = cache.stats()
    return stats.hit_whole_tokens / stats.lookup_tokens


if __name__ == "__main__":
    print(f"lru             {hit_rate('lru'):6.1%}")
    print(f"shortest first  {hit_rate(ShortestFirst()):6.1%}")
