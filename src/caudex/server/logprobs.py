"""Log-probabilities of prompt tokens, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from caudex.engine.types import TokenLogprob

Entry = dict[str, dict[str, Any]]


def prompt_logprobs(scores: Sequence[TokenLogprob], token: Callable[[int], str]) -> list[Entry | None]:
    """For each prompt token its own entry and those of the alternatives, by token id; None for the first token."""
    return [None, *(entry(score, token) for score in scores)]


def entry(score: TokenLogprob, token: Callable[[int], str]) -> Entry:
    ranked = [(score.token_id, score.logprob, score.rank)]
    ranked += [(token_id, value, rank) for rank, (token_id, value) in enumerate(score.top, 1)]
    return {
        str(token_id): {"logprob": value, "rank": rank, "decoded_token": token(token_id)}
        for token_id, value, rank in ranked
    }
