"""Caudex under the peers' own micro-benchmark of cache managers: pass `manager_adapter:CaudexAdapter` as its adapter.

The protocol, a request at a time: new, hash, match, alloc (pin, allocate and register), decode a token, free.
"""

from __future__ import annotations

import numpy as np

from caudex.cache import OutOfBlocks, PrefixCache, Sequence


class Handle:
    __slots__ = ("seq", "tokens")

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.seq: Sequence | None = None


class CaudexAdapter:
    """`algo` is the index: radix or hash."""

    def __init__(self, num_blocks: int, block_size: int, algo: str) -> None:
        index = "hash" if algo == "hash" else "radix"
        self.cache = PrefixCache(num_blocks, block_size, index=index)

    def new(self, i: int, tokens: list[int]) -> Handle:
        return Handle(np.array(tokens, np.int32))

    def hash(self, h: Handle) -> None:
        """Nothing: keys are computed where they are needed, at commit."""

    def match(self, h: Handle) -> int:
        return self.cache.match(h.tokens).num_tokens

    def alloc(self, h: Handle) -> bool:
        seq = self.cache.begin(h.tokens)
        try:
            seq.allocate(len(h.tokens))
        except OutOfBlocks:
            seq.release()
            return False
        seq.commit(len(h.tokens))
        h.seq = seq
        return True

    def decode(self, h: Handle, tok: int) -> bool:
        assert h.seq is not None
        try:
            self.cache.append_and_allocate([h.seq], [tok])
        except OutOfBlocks:
            return False
        self.cache.commit_all([h.seq])
        return True

    def free(self, h: Handle) -> None:
        assert h.seq is not None
        h.seq.release()
