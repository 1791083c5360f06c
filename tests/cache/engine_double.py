"""An engine in miniature: a KV buffer whose every slot holds the tokens up to it, so a wrong block shows at once."""

from __future__ import annotations

from collections.abc import Iterable

from caudex.cache import BlockCopy, PrefixCache, Sequence

Tokens = tuple[int, ...]


class MiniEngine:
    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.kv: dict[tuple[int, int], Tokens] = {}
        self.prompts: dict[int, Tokens] = {}

    def execute(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            for slot in range(copy.num_slots):
                if (copy.src, slot) in self.kv:
                    self.kv[copy.dst, slot] = self.kv[copy.src, slot]

    def compute(self, seq: Sequence, tokens: Tokens) -> None:
        """Allocates, writes the KV of what is not cached, and commits."""
        self.execute(seq.allocate(len(tokens)))
        table = seq.block_table.tolist()
        size = self.cache.block_size
        for i in range(seq.num_committed_tokens, len(tokens)):
            self.kv[table[i // size], i % size] = tokens[: i + 1]
        seq.commit(len(tokens))
        self.verify(seq, tokens)

    def verify(self, seq: Sequence, tokens: Tokens) -> None:
        table = seq.block_table.tolist()
        size = self.cache.block_size
        for i in range(seq.num_committed_tokens):
            assert self.kv[table[i // size], i % size] == tokens[: i + 1]

    def serve(self, tokens: Iterable[int], namespace: str = "") -> int:
        """A whole request; how many of its tokens were cached."""
        prompt = tuple(tokens)
        seq = self.cache.begin(prompt, namespace)
        hit = seq.num_cached_tokens
        self.compute(seq, prompt)
        seq.release()
        self.cache.check_invariants()
        return hit
