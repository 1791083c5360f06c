"""The heaviest shared prefixes of a log, as a tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from caudex.cache.block_trace import BlockTrace

MIN_SHARE = 0.0003
MAX_NODES = 300
MAX_CHILDREN = 12
MAX_DEPTH = 24


@dataclass(slots=True)
class PrefixNode:
    """A run of blocks that the same requests share: blocks `start` up to `end` of each of them.

    `tokens_saved` is what sharing the run saves: its tokens, once for each request but the first. `sample` is one of
    the requests, to show the text from.
    """

    start: int
    end: int
    requests: int
    tokens_saved: int
    sample: int
    children: list[PrefixNode] = field(default_factory=list)


def prefix_tree(trace: BlockTrace) -> list[PrefixNode]:
    """The roots, the heaviest first; runs used by fewer than two requests or saving under 0.03 % of the prompt
    tokens are left out. O(log depth) comparisons a request and node."""
    budget = [MAX_NODES]
    least = MIN_SHARE * max(trace.prompt_tokens, 1)
    everyone = np.flatnonzero(trace.num_full_blocks > 0)
    return _children(trace, everyone, 0, least, budget, 0)


def _children(
    trace: BlockTrace,
    requests: np.ndarray[tuple[int], np.dtype[np.int64]],
    depth: int,
    least: float,
    budget: list[int],
    level: int,
) -> list[PrefixNode]:
    longer = requests[trace.num_full_blocks[requests] > depth]
    if len(longer) < 2 or level > MAX_DEPTH:
        return []
    heads = trace.block_ids[trace.offsets[longer] + depth]
    order = np.argsort(heads, kind="stable")
    bounds = np.flatnonzero(np.diff(heads[order])) + 1
    nodes: list[PrefixNode] = []
    groups = sorted(np.split(longer[order], bounds), key=len, reverse=True)
    for group in groups[:MAX_CHILDREN]:
        if len(group) < 2:
            break
        end = _common_end(trace, group, depth)
        saved = (end - depth) * trace.block_size * (len(group) - 1)
        weight = int(np.minimum(trace.num_full_blocks[group] - depth, 1 << 30).sum()) * trace.block_size
        if weight < least or budget[0] <= 0:
            continue
        budget[0] -= 1
        node = PrefixNode(depth, end, len(group), saved, int(group[0]))
        node.children = _children(trace, group, end, least, budget, level + 1)
        if saved >= least or node.children:
            nodes.append(node)
    return sorted(nodes, key=lambda node: -(node.tokens_saved + sum(child.tokens_saved for child in node.children)))


def _common_end(trace: BlockTrace, group: np.ndarray[tuple[int], np.dtype[np.int64]], depth: int) -> int:
    """How deep all of `group` agree. Ids are chained, so agreement at a depth is agreement up to it: bisect."""
    starts = trace.offsets[group]
    low, high = depth + 1, int(trace.num_full_blocks[group].min())
    while low < high:
        middle = (low + high + 1) // 2
        ids = trace.block_ids[starts + middle - 1]
        if (ids == ids[0]).all():
            low = middle
        else:
            high = middle - 1
    return low
