"""Log-probabilities of prompt tokens, kept beside their KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from caudex.cache import BlockCopy
from caudex.engine.batch import Int32Array
from caudex.engine.types import MAX_LOGPROBS, TokenLogprob


class PromptScores:
    """What scoring has found about the token in each slot of the KV pool.

    A token's log-probability depends on the tokens up to it alone, as its KV does. So a score stays true for as long as
    its slot keeps its KV, whoever put it there, and a prompt that shares a scored beginning needs only the rest.

    The caller guarantees: `forget` before a block holds other tokens, `copy` whenever slots are copied.

    Rejected: keeping hidden states, a tenth of the KV for every token whether anyone scores or not, and the largest
    matrix product of the model would still be due.

    Memory: 173 bytes a slot, none before the first `keep`, and pages of blocks that hold no scores are never touched.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_slots = num_blocks * block_size
        self._width: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)  # 0: not known; else alternatives kept, plus one.

    def find(self, block_table: Int32Array, num_tokens: int, tokens: Int32Array, num_top: int) -> list[TokenLogprob]:
        """Scores of tokens 1, 2 ... below `num_tokens`, as far as all are known with `num_top` alternatives each."""
        slots = self._slots(block_table, 1, 1 + self.count(block_table, num_tokens, num_top)).tolist()
        return [self._at(slot, token, num_top) for slot, token in zip(slots, tokens[1:].tolist(), strict=False)]

    def count(self, block_table: Int32Array, num_tokens: int, num_top: int) -> int:
        """How many scores `find` would give."""
        if not len(self._width) or num_tokens < 2:
            return 0
        lacking = np.flatnonzero(self._width[self._slots(block_table, 1, num_tokens)] < num_top + 1)
        return int(lacking[0]) if len(lacking) else num_tokens - 1

    def keep(self, block_table: Int32Array, first: int, scores: Sequence[TokenLogprob]) -> None:
        """Keep the scores of a sequence's tokens from `first` on."""
        if not len(self._width):
            self._allocate()
        for slot, score in zip(self._slots(block_table, first, first + len(scores)).tolist(), scores, strict=True):
            num_top = len(score.top)
            self._logprob[slot], self._rank[slot] = score.logprob, score.rank
            if num_top:
                self._top_ids[slot, :num_top], self._top_logprobs[slot, :num_top] = zip(*score.top, strict=True)
            self._width[slot] = num_top + 1

    def forget(self, blocks: Int32Array) -> None:
        """The blocks are taken for other tokens."""
        if len(self._width):
            self._width.reshape(-1, self._block_size)[blocks] = 0

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Do with scores what is done with KV."""
        if not len(self._width):
            return
        for copy in copies:
            source = slice(copy.src * self._block_size, copy.src * self._block_size + copy.num_slots)
            target = slice(copy.dst * self._block_size, copy.dst * self._block_size + copy.num_slots)
            for array in (self._width, self._logprob, self._rank, self._top_ids, self._top_logprobs):
                array[target] = array[source]

    def _allocate(self) -> None:
        self._width = np.zeros(self._num_slots, dtype=np.uint8)
        self._logprob = np.zeros(self._num_slots, dtype=np.float32)
        self._rank = np.zeros(self._num_slots, dtype=np.int32)
        self._top_ids = np.zeros((self._num_slots, MAX_LOGPROBS), dtype=np.int32)
        self._top_logprobs = np.zeros((self._num_slots, MAX_LOGPROBS), dtype=np.float32)

    def _slots(self, block_table: Int32Array, start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end)
        return block_table[positions // self._block_size].astype(np.int64) * self._block_size + (
            positions % self._block_size
        )

    def _at(self, slot: int, token_id: int, num_top: int) -> TokenLogprob:
        top = zip(self._top_ids[slot, :num_top].tolist(), self._top_logprobs[slot, :num_top].tolist(), strict=True)
        return TokenLogprob(token_id, float(self._logprob[slot]), int(self._rank[slot]), tuple(top))
