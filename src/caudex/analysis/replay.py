"""What an infinite cache would serve of a list of requests: the yardstick for a mend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caudex.analysis.prefix_set import PrefixSet
from caudex.cache.block_trace import BlockTrace
from caudex.trace.chain import Int64Array, every_block, prefix_hashes, seed_of
from caudex.trace.encode import PromptEncoder, in_batches
from caudex.trace.request import Request


@dataclass(frozen=True, slots=True)
class Replay:
    """Prompt tokens and tokens served, a request each."""

    lengths: Int64Array
    hits: Int64Array

    @property
    def hit_rate(self) -> float:
        return float(self.hits.sum() / max(self.lengths.sum(), 1))

    @property
    def computed(self) -> Int64Array:
        return self.lengths - self.hits


def reusable_blocks(length: int, block_size: int) -> int:
    """Full blocks of a prompt that may come from a cache: its last token is always computed."""
    return max(length - 1, 0) // block_size


def block_trace(requests: list[Request], encoder: PromptEncoder, block_size: int) -> BlockTrace:
    """Requests as the caches' replay takes them."""
    paths: list[Int64Array] = []
    lengths: list[int] = []
    for batch in in_batches(requests):
        for request, tokens in zip(batch, encoder.encode(batch), strict=True):
            paths.append(every_block(prefix_hashes(tokens, seed_of(*request.namespace)), block_size))
            lengths.append(len(tokens))
    offsets = np.concatenate([[0], np.cumsum([len(path) for path in paths])])
    return BlockTrace(np.concatenate(paths), offsets, np.asarray(lengths), block_size)


def replay(requests: list[Request], encoder: PromptEncoder, block_size: int) -> Replay:
    """One request after another, each finished before the next, nothing ever evicted."""
    seen = PrefixSet()
    lengths = np.zeros(len(requests), dtype=np.int64)
    hits = np.zeros(len(requests), dtype=np.int64)
    index = 0
    for batch in in_batches(requests):
        for request, tokens in zip(batch, encoder.encode(batch), strict=True):
            blocks = every_block(prefix_hashes(tokens, seed_of(*request.namespace)), block_size)
            known = seen.visit(blocks)
            lengths[index] = len(tokens)
            hits[index] = min(known, reusable_blocks(len(tokens), block_size)) * block_size
            index += 1
    return Replay(lengths, hits)
