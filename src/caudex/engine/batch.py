"""One step's work as arrays: what a model runner computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step, packed in one row, sequence after sequence, with where their KV lies.

        sequence i      |<------------- context_lens[i] ------------->|
        its tokens      |--- KV is in the pool ---|--- this step's ---|
        rows of the batch             query_starts[i] .. query_starts[i + 1]

    Attributes:
        token_ids: shape (T,).
        positions: shape (T,); a token's index in its sequence.
        query_starts: shape (S + 1,); rows of sequence i are `query_starts[i]:query_starts[i + 1]`.
        context_lens: shape (S,); tokens of sequence i that have KV once the step is done.
        block_tables: one array a sequence; its entry j is the block of the tokens from `j * block_size` on, and where
            those of this step are written.
        adapters: the LoRA adapter of each sequence, or None.
        logit_rows: shape (R,); the rows whose logits are wanted, ascending.
    """

    token_ids: Int32Array
    positions: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    block_tables: list[Int32Array]
    adapters: list[str | None]
    logit_rows: Int32Array

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)
