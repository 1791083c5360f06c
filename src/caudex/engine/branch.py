"""Texts that are continued and forked: samples of one prompt, beams, trees of thoughts."""

from __future__ import annotations

from collections.abc import Sequence

from caudex.engine.engine import Engine
from caudex.engine.types import Completion, SamplingParams


class Branch:
    """One line of a search: a text so far, to be continued by the model or by hand, and to be forked.

    Forking copies token ids only. What two branches have in common is in the prefix cache once, because the engine
    keeps what it has computed of either; the first token in which they differ copies one block at most. So a tree of
    any shape computes each of its nodes once, as long as the pool holds it.
    """

    def __init__(self, engine: Engine, token_ids: Sequence[int], namespace: str = "") -> None:
        self._engine = engine
        self._namespace = namespace
        self.token_ids = list(token_ids)
        self.completions: list[Completion] = []

    @property
    def text(self) -> str:
        """All of it, special tokens left out."""
        return self._engine.tokenizer.decode(self.token_ids)

    @property
    def logprob(self) -> float:
        """Sum over all tokens generated with `logprobs` on: how likely the model finds its own part of the branch."""
        return sum(token.logprob for completion in self.completions for token in completion.logprobs)

    def fork(self) -> Branch:
        """Another branch with the same text and history."""
        twin = Branch(self._engine, self.token_ids, self._namespace)
        twin.completions = list(self.completions)
        return twin

    def append(self, text: str) -> None:
        """Add text that the model did not write."""
        self.token_ids += self._engine.tokenizer.encode(text, add_special_tokens=False)

    def generate(self, sampling: SamplingParams) -> Completion:
        """Let the model go on; what it writes becomes part of the branch."""
        return generate_branches([self], sampling)[0]


def generate_branches(branches: Sequence[Branch], sampling: SamplingParams) -> list[Completion]:
    """Let the model continue several branches of one engine and namespace side by side."""
    if not branches:
        return []
    first = branches[0]
    prompts = [branch.token_ids for branch in branches]
    completions = first._engine.generate(prompts, sampling, namespace=first._namespace)
    for branch, completion in zip(branches, completions, strict=True):
        branch.token_ids += completion.token_ids
        branch.completions.append(completion)
    return completions
