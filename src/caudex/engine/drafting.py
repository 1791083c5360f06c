"""How many guessed tokens a step tries beside those that are certain (speculative decoding; Leviathan et al., 2023)."""

from __future__ import annotations

from collections import Counter

from caudex.engine.step import ScheduledChunk, Step

ROW_COST = 0.09
"""What one more row adds to a step, as a share of a step of one row: 0.5 of 5.5 ms with bfloat16 weights, 0.3 of 4.3
with int8 (SmolLM2-135M, two Zen 4 cores)."""


class Drafting:
    """Lets decoding requests try what their `PromptLookup` guesses, as far as that makes the step's tokens come sooner.

    A step computes a request's newest token and, right after it, its draft. Each row is sampled as if it came alone:
    a row's logits are the same bits in any company, and its random number has the position's name. The tokens are
    those without a draft, up to and with the first that was guessed wrong; the rest is dropped.

    How long a draft is. A step of R rows takes about 1 + c(R - 1) times as long as a step of one row, c being
    `ROW_COST`. Where it is expected to give N tokens, a further row that is right with probability q is worth it if
    (N + q) tokens in the longer time are more a second, that is if

        q > N c / (1 + c (R - 1)).

    A guess's token i is right with probability `acceptance` ** i. So a lone request tries anything likelier than 9 %,
    eight at once what is likelier than 44 %, and in the company of a long prompt hardly anything is worth a row.
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
        lengths: Counter[int] = Counter()
        num_rows = expected = float(step.num_tokens)
        for chance, place in ranked[:spare]:
            if chance <= expected * ROW_COST / (1 + ROW_COST * (num_rows - 1)):
                break
            lengths[place] += 1
            num_rows += 1
            expected += chance
        return [(place, guesses[place][:length]) for place, length in lengths.items()]

    def _guess(self, chunk: ScheduledChunk) -> list[int]:
        """A decoding request's guess; never more than may still be generated after the token that is due anyway."""
        lookup, output = chunk.state.lookup, chunk.state.output
        if lookup is None or not output or chunk.num_tokens > 1:
            return []
        return lookup.guess(output, min(self._max_tokens, chunk.state.num_output_left - 1))

    def _chance(self, chunk: ScheduledChunk, index: int) -> float:
        lookup = chunk.state.lookup
        return lookup.acceptance ** (index + 1) if lookup is not None else 0.0
