"""How many guessed tokens a step tries beside those that are certain (speculative decoding; Leviathan et al., 2023)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from caudex.engine.step import ScheduledChunk, Step

ROWS_WHILE_READING = 9
"""Rows that are computed while a step's weights are read (SmolLM2-135M, two Zen 4 cores: 9 in bfloat16, 10 in int8)."""
EXTRA_COST = 0.02
"""What a drafted row adds to a step all the same, as a share of it: attention, sampling, packing."""


class Drafting:
    """Lets decoding requests try what their `PromptLookup` guesses, as far as that makes the step's tokens come sooner.

    A step computes a request's newest token and, right after it, its draft. Each row is sampled as if it came alone:
    a row's logits are the same bits in any company, and its random number has the position's name. The tokens are
    those without a draft, up to and with the first that was guessed wrong; the rest is dropped.

    How long drafts are. Token i of a guess is right with probability `acceptance` ** i. Of all requests' tokens, best
    first, as many are tried as make most tokens a second: certain ones and expected ones, through what a step of so
    many rows takes (a roofline; Williams et al., 2009). So a lone request, whose step waits for the weights, tries
    whatever has a chance of a few percent, eight at once one or two tokens between them, and more nothing: once a step
    computes longer than it reads, a row costs what its token is worth.

    Rejected: learning the two numbers from the steps' own times. Where they are noisy, as on a shared machine, what is
    learnt is the noise, and costs more than the better numbers bring.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens

    def choose(self, step: Step, spare: int) -> list[tuple[int, list[int]]]:
        """Drafts of at most `spare` tokens in all, each with the place of the chunk it is to follow."""
        guesses = {place: guess for place, chunk in enumerate(step.chunks) if (guess := self._guess(chunk))}
        ranked = sorted(
            (
                (self._chance(step.chunks[place], index), place)
                for place, guess in guesses.items()
                for index in range(len(guess))
            ),
            reverse=True,
        )
        count = self._best_count(step.num_tokens, [chance for chance, _ in ranked[:spare]])
        lengths = Counter(place for _, place in ranked[:count])
        return [(place, guesses[place][:length]) for place, length in lengths.items()]

    def _best_count(self, num_rows: int, chances: Sequence[float]) -> int:
        """How many rows with these falling chances make most tokens a second beside `num_rows` that are certain."""
        expected = accumulate(chances, initial=float(num_rows))
        rates = [tokens / _step_time(num_rows, extra) for extra, tokens in enumerate(expected)]
        return max(range(len(rates)), key=rates.__getitem__)

    def _guess(self, chunk: ScheduledChunk) -> list[int]:
        """A decoding request's guess; never more than may still be generated after the token that is due anyway."""
        lookup, output = chunk.state.lookup, chunk.state.output
        if lookup is None or not output or chunk.num_tokens > 1:
            return []
        return lookup.guess(output, min(self._max_tokens, chunk.state.num_output_left - 1))

    def _chance(self, chunk: ScheduledChunk, index: int) -> float:
        lookup = chunk.state.lookup
        return lookup.acceptance ** (index + 1) if lookup is not None else 0.0


def _step_time(num_rows: int, extra: int) -> float:
    """What a step of `num_rows` certain and `extra` drafted rows takes; 1 is one that waits for the weights alone."""
    return max(1 + EXTRA_COST * extra, (num_rows + extra) / ROWS_WHILE_READING)
