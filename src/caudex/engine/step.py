"""What the scheduler hands to the model for one step, and its packing into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from caudex.cache import BlockCopy
from caudex.engine.batch import Int32Array, StepBatch
from caudex.engine.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `start:end` of `state` are computed in this step, and behind them the guesses of a `draft`.

    `samples` says whether the last one's logits give a token. With a draft, each of its tokens' gives one more, as long
    as what was sampled before is what was guessed.
    """

    state: SequenceState
    start: int
    end: int
    samples: bool
    draft: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start + len(self.draft)

    @property
    def num_logit_rows(self) -> int:
        """How many of the chunk's last rows have their logits computed."""
        if self.state.is_scoring:
            return self.num_tokens
        return 1 + len(self.draft) if self.samples else 0

    def token_ids(self) -> Int32Array:
        """Shape (num_tokens,)."""
        tokens = self.state.token_slice(self.start, self.end)
        return np.concatenate([tokens, np.asarray(self.draft, dtype=np.int32)]) if self.draft else tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """`state` gets tokens from these `rows` of a step's logits: one, and one more for each right guess of `draft`."""

    state: SequenceState
    rows: range
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockImport:
    """Bytes that belong into the block at `place` of a request's block table."""

    place: int
    data: bytes


@dataclass(slots=True)
class Step:
    """One step's chunks, in the order in which they were scheduled, and the block copies to make before it.

    After those copies, and before the model runs, fetched blocks are written (`imports`).

    Once its KV is written, requests may branch off a chunk's (`forks`): they sample from the same logits, and their
    copies (`fork_copies`) are to be made before the next step.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    forks: list[tuple[ScheduledChunk, SequenceState]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    imports: list[tuple[SequenceState, list[BlockImport]]] = field(default_factory=list)
    fork_copies: list[BlockCopy] = field(default_factory=list)
    num_tokens: int = 0
    num_preempted: int = 0

    def add(self, chunk: ScheduledChunk) -> None:
        self.chunks.append(chunk)
        self.num_tokens += chunk.num_tokens

    def add_draft(self, place: int, draft: Sequence[int]) -> None:
        """Have the chunk at `place`, which samples, followed by guesses."""
        self.chunks[place] = replace(self.chunks[place], draft=tuple(draft))
        self.num_tokens += len(draft)

    def logit_spans(self) -> list[tuple[ScheduledChunk, int, int]]:
        """Each chunk that has logits, with where they begin and end among the rows that the batch gives."""
        ends = np.cumsum([chunk.num_logit_rows for chunk in self.chunks]).tolist()
        spans = zip(self.chunks, ends, strict=True)
        return [(chunk, end - chunk.num_logit_rows, end) for chunk, end in spans if chunk.num_logit_rows]

    def samplings(self) -> list[Sampling]:
        """The requests that get a token, each with its rows among those of the batch's logits."""
        own: dict[int, Sampling] = {}
        end = 0
        for chunk in self.chunks:
            end += chunk.num_logit_rows
            if chunk.samples:
                own[id(chunk)] = Sampling(chunk.state, range(end - 1 - len(chunk.draft), end), chunk.draft)
        return [*own.values(), *(Sampling(state, own[id(chunk)].rows) for chunk, state in self.forks)]

    def batch(self) -> StepBatch:
        """Pack the chunks. Only for a step that has some."""
        lengths = [chunk.num_tokens for chunk in self.chunks]
        starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        ends = starts[1:].tolist()
        logit_rows = [range(end - chunk.num_logit_rows, end) for chunk, end in zip(self.chunks, ends, strict=True)]
        return StepBatch(
            token_ids=np.concatenate([chunk.token_ids() for chunk in self.chunks]),
            positions=np.concatenate(
                [np.arange(chunk.start, chunk.start + chunk.num_tokens, dtype=np.int32) for chunk in self.chunks]
            ),
            query_starts=starts,
            context_lens=np.asarray([chunk.start + chunk.num_tokens for chunk in self.chunks], dtype=np.int32),
            block_tables=[chunk.state.block_table for chunk in self.chunks],
            adapters=[chunk.state.adapter for chunk in self.chunks],
            logit_rows=np.fromiter(chain.from_iterable(logit_rows), dtype=np.int32),
        )


def copy_rows(copies: Sequence[BlockCopy]) -> Int32Array:
    """Copies as rows (source block, target block, slots)."""
    rows = [(copy.src, copy.dst, copy.num_slots) for copy in copies]
    return np.asarray(rows, dtype=np.int32).reshape(-1, 3)
