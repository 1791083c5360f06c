"""A request log with its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudex.cache.block_trace import OPTIONAL_COLUMNS, as_column, check_lengths, check_offsets, check_timestamps


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """Requests in order of arrival, each its prompt and then, if the log has it, what was generated.

    Request `i` is `tokens[offsets[i]:offsets[i + 1]]`, the first `prompt_lengths[i]` of them its prompt. Raises
    ValueError where the arrays do not fit together.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    """(requests + 1,), from 0 to the number of tokens."""
    prompt_lengths: NDArray[np.int64]
    timestamps: NDArray[np.float64] | None = None
    """(requests,), arrival in seconds, in any epoch."""
    tenants: NDArray[np.int64] | None = None
    """(requests,), whose request it is."""
    sessions: NDArray[np.int64] | None = None
    """(requests,), the conversation a request belongs to; negative where unknown."""
    expected_returns: NDArray[np.float64] | None = None
    """(requests,), seconds until the session's next request as foretold with this one; negative where unknown."""
    session_ends: NDArray[np.bool_] | None = None
    """(requests,), whether the session was said to end with this request."""
    priorities: NDArray[np.float64] | None = None
    """(requests,), higher is kept longer by policies that look at it."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_column(name, getattr(self, name), dtype))
        columns = {name: getattr(self, name) for name in _DTYPES if name in OPTIONAL_COLUMNS}
        check_lengths(len(self), offsets=self.offsets[1:], **columns)
        check_offsets(self.offsets, len(self.tokens), "tokens")
        check_timestamps(self.timestamps)
        outside = (self.prompt_lengths < 0) | (self.prompt_lengths > np.diff(self.offsets))
        if np.any(outside):
            at = int(np.argmax(outside))
            length = self.offsets[at + 1] - self.offsets[at]
            raise ValueError(f"prompt_lengths[{at}] is {self.prompt_lengths[at]}; the request has {length} tokens")
        if np.any(self.tokens < 0):
            at = int(np.argmax(self.tokens < 0))
            raise ValueError(f"tokens[{at}] is {self.tokens[at]}; a token id is not negative")

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.prompt_lengths)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in all prompts: what hit rates are fractions of."""
        return int(self.prompt_lengths.sum())


_DTYPES: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "offsets": np.int64,
    "prompt_lengths": np.int64,
    **{name: dtype for name, dtype in OPTIONAL_COLUMNS.items() if name != "output_lengths"},
}
