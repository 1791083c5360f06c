"""What an infinite cache would serve of a list of requests: the yardstick for a mend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caudex.cache.block_trace import BlockTrace
from caudex.cache.trace_builder import TraceBuilder
from caudex.trace.chain import Int64Array
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
    builder = TraceBuilder("tokens")
    _add_all(builder, requests, encoder)
    return builder.build(block_size)


def replay(requests: list[Request], encoder: PromptEncoder, block_size: int) -> Replay:
    """One request after another, each finished before the next, nothing ever evicted."""
    known, lengths = _add_all(TraceBuilder("tokens"), requests, encoder)
    reusable = np.maximum(lengths - 1, 0) // block_size
    return Replay(lengths, np.minimum(known // block_size, reusable) * block_size)


def _add_all(builder: TraceBuilder, requests: list[Request], encoder: PromptEncoder) -> tuple[Int64Array, Int64Array]:
    """The leading tokens that earlier requests have had, and the length, of each."""
    known = [np.zeros(0, dtype=np.int64)]
    lengths = [np.zeros(0, dtype=np.int64)]
    for batch in in_batches(requests):
        arrays = encoder.encode(batch)
        lengths.append(np.array([len(tokens) for tokens in arrays], dtype=np.int64))
        offsets = np.concatenate([[0], np.cumsum(lengths[-1])])
        known.append(
            builder.add(np.concatenate(arrays), offsets, lengths[-1], [request.namespace for request in batch])
        )
    return np.concatenate(known), np.concatenate(lengths)
