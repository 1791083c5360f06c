"""A guesser for tests, which knows the answers and is wrong as often as asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from caudex.engine.prompt_lookup import PromptLookup

Answers = dict[tuple[int, ...], list[list[int]]]


class Oracle(PromptLookup):
    """Guesses what one of the known `answers` to a prompt says next; each token is wrong with probability `error`."""

    def __init__(
        self, prompt: np.ndarray, answers: Sequence[Sequence[int]], rng: random.Random, error: float, vocab: int
    ) -> None:
        super().__init__(prompt)
        self.acceptance = 1.0
        self._answers = answers
        self._rng, self._error, self._vocab = rng, error, vocab

    def guess(self, output: Sequence[int], limit: int) -> list[int]:
        size = len(output)
        ahead = [answer[size : size + limit] for answer in self._answers if list(answer[:size]) == list(output)]
        return [self._garbled(token) for token in self._rng.choice(ahead)] if ahead else []

    def _garbled(self, token: int) -> int:
        return (token + 1) % self._vocab if self._rng.random() < self._error else token


@contextmanager
def guessing(answers: Answers, rng: random.Random, error: float, vocab: int) -> Iterator[None]:
    """Within this context, engines guess by an `Oracle`."""

    def make(prompt: np.ndarray) -> Oracle:
        return Oracle(prompt, answers.get(tuple(prompt.tolist()), []), random.Random(rng.random()), error, vocab)

    with patch("caudex.engine.engine.PromptLookup", make):
        yield
