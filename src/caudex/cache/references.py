"""Caches that Caudex is not, as studies of eviction describe them: to reproduce their figures, never to serve with.

Both are small and slow (a few million blocks a second), and run a log the way `replay` does: requests one after
another, the running one protected, one that is longer than the whole cache keeping its first blocks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from caudex.cache.block_trace import BlockTrace

ReferenceName = Literal["block_fifo", "whole_leaves"]


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """What a reference cache served of a log."""

    hit_blocks: NDArray[np.int64]
    """(requests,), blocks served to each request."""
    hit_tokens: int
    prompt_tokens: int

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens served from the cache."""
        return self.hit_tokens / max(self.prompt_tokens, 1)


def replay_reference(trace: BlockTrace, name: ReferenceName, capacity: int) -> ReferenceResult:
    """Run a log through one of the reference caches, of `capacity` blocks.

    - `block_fifo` (`BlockFifo`) is not prefix-closed; the policy "fifo" of `replay` is, and serves a little more.
    - `whole_leaves` (`WholeLeaves`) differs from `PrefixCache.like_sglang`: see what a match inside a node touches.
    """
    if name not in _CACHES:
        raise ValueError(f"there is no reference cache {name!r}: choose one of {', '.join(get_args(ReferenceName))}")
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}; it must be at least one block")
    cache = _CACHES[name](capacity)
    ids, offsets = trace.block_ids()
    hits = np.zeros(len(trace), dtype=np.int64)
    for i, reusable in enumerate(trace.num_reusable_blocks.tolist()):
        path = ids[offsets[i] : min(offsets[i + 1], offsets[i] + capacity)].tolist()
        hits[i] = min(cache.serve(path), reusable)
    return ReferenceResult(hits, int(hits.sum()) * trace.block_size, trace.prompt_tokens)


class ReferenceCache(Protocol):
    def serve(self, path: list[int]) -> int:
        """Return how many leading blocks of a path are there, and keep the whole of it, at most `capacity` blocks."""
        ...


class BlockFifo:
    """One queue of single blocks: the first that came goes first, whatever still builds on it.

    A request's new blocks join the queue last one first, so that its beginning outlives its end. O(1) a block, and
    O(path) a request to step over its own blocks.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: OrderedDict[int, None] = OrderedDict()

    def serve(self, path: list[int]) -> int:
        queue = self._queue
        served = sum(1 for _ in takewhile(queue.__contains__, path))
        new = [block for block in reversed(path) if block not in queue]
        own = set(path)
        overflow = max(len(queue) + len(new) - self._capacity, 0)
        for block in list(islice((block for block in queue if block not in own), overflow)):
            del queue[block]
        queue.update(dict.fromkeys(new))
        return served


class WholeLeaves:
    """A radix tree that evicts whole leaves, the least recently used first, until the shortfall is covered.

        parent -- node [a b c d]      a path a b x      parent -- [a b] -- [c d]
                                      becomes                          \\-- [x]

    What a path matches is touched; the rest of a node that it splits keeps its time. O(log leaves) a node.
    """

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._root = _Node(None, [], 0)
        self._clock = 0
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap; what has been touched, grown or gone since is stale

    def serve(self, path: list[int]) -> int:
        self._clock += 1
        node, matched = self._match(path)
        if matched < len(path):
            self._evict_until(len(path) - matched)
            self._free -= len(path) - matched
            node.children[path[matched]] = node = _Node(node, path[matched:], self._clock)
        self._offer(node)
        return matched

    def _match(self, path: list[int]) -> tuple[_Node, int]:
        node, matched = self._root, 0
        while matched < len(path) and (child := node.children.get(path[matched])) is not None:
            ahead = path[matched : matched + len(child.path)]
            common = next((i for i, (a, b) in enumerate(zip(child.path, ahead, strict=False)) if a != b), len(ahead))
            matched += common
            node = child if common == len(child.path) else child.split(common)
            node.touched = self._clock
        return node, matched

    def _evict_until(self, wanted: int) -> None:
        while self._free < wanted:
            touched, _, leaf = heapq.heappop(self._leaves)
            if leaf.touched != touched or leaf.children or leaf.parent is None:
                continue
            self._free += len(leaf.path)
            parent, leaf.parent = leaf.parent, None
            del parent.children[leaf.path[0]]
            if parent.touched < self._clock:  # not on the running request's path
                self._offer(parent)

    def _offer(self, node: _Node) -> None:
        if not node.children and node.parent is not None:
            heapq.heappush(self._leaves, (node.touched, id(node), node))


class _Node:
    """A run of blocks below its parent; `touched` is the last request that went through it."""

    __slots__ = ("children", "parent", "path", "touched")

    def __init__(self, parent: _Node | None, path: list[int], touched: int) -> None:
        self.parent = parent
        self.path = path
        self.children: dict[int, _Node] = {}
        self.touched = touched

    def split(self, at: int) -> _Node:
        """Give the first blocks to a new node above, and return that."""
        assert self.parent is not None
        upper = _Node(self.parent, self.path[:at], self.touched)
        self.parent.children[self.path[0]] = upper
        self.path = self.path[at:]
        upper.children[self.path[0]] = self
        self.parent = upper
        return upper


_CACHES: dict[str, Callable[[int], ReferenceCache]] = {"block_fifo": BlockFifo, "whole_leaves": WholeLeaves}
