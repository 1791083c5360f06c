"""What can be wrong with a log, told to the user."""

from __future__ import annotations


class TraceError(ValueError):
    """A log cannot be read; the message says what was found, where, and what to do about it."""


class TooManyBadLinesError(TraceError):
    """More of the log could not be read than can be skipped in good conscience."""


class LengthsOnlyError(TraceError):
    """The log has token counts but neither text, token ids nor block hashes, so nothing can be said about prefixes."""

    def __init__(self, source: str, found: str) -> None:
        super().__init__(
            f"{source} holds lengths only ({found}): it says how long prompts were, not which of them begin alike, "
            "so no question about prefixes can be answered from it. A log with messages, prompts, token ids or "
            "hash_ids is needed."
        )
