"""The heaviest shared prefixes of a log, as a tree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from caudex.cache.block_trace import BlockTrace, SharedRuns

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
    tokens are left out."""
    least = MIN_SHARE * max(trace.prompt_tokens, 1)
    runs = trace.shared_runs(math.ceil(least / trace.block_size))
    children: defaultdict[int, list[int]] = defaultdict(list)
    for run in np.argsort(-runs.requests, kind="stable").tolist():
        children[int(runs.parents[run])].append(run)
    return _Picker(runs, children, trace.block_size, least).nodes(-1, 0)


@dataclass(slots=True)
class _Picker:
    """Takes runs depth first, the most shared of each level before the others, until there are MAX_NODES."""

    runs: SharedRuns
    children: Mapping[int, list[int]]
    block_size: int
    least: float
    taken: int = 0

    def nodes(self, parent: int, level: int) -> list[PrefixNode]:
        if level > MAX_DEPTH:
            return []
        found = (self._node(run, level) for run in self.children.get(parent, [])[:MAX_CHILDREN])
        nodes = [node for node in found if node is not None]
        return sorted(nodes, key=lambda node: -(node.tokens_saved + sum(child.tokens_saved for child in node.children)))

    def _node(self, run: int, level: int) -> PrefixNode | None:
        if self.taken >= MAX_NODES:
            return None
        self.taken += 1
        start, end, requests = (int(column[run]) for column in (self.runs.starts, self.runs.ends, self.runs.requests))
        saved = (end - start) * self.block_size * (requests - 1)
        children = self.nodes(run, level + 1)
        if saved < self.least and not children:
            return None
        return PrefixNode(start, end, requests, saved, int(self.runs.samples[run]), children)
