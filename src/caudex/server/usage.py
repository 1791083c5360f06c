"""Token counts of an answer, as OpenAI reports them, with what the cache gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caudex.server.endpoint import Choice


def usage(choices: Sequence[Choice], num_samples: int = 1) -> dict[str, Any]:
    """The `usage` object. A prompt counts once however many samples it has; choices of a prompt are neighbours.

    `cached_tokens` are those of each prompt's first sample: what an earlier request had left, and not what the
    samples of one request shared among themselves.
    """
    firsts = choices[::num_samples]
    prompt = sum(choice.num_prompt_tokens for choice in firsts)
    cached = sum(choice.num_cached_tokens for choice in firsts)
    completion = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
