"""Generated token ids to text, as they come, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caudex.engine.tokenizer import REPLACEMENT, Tokenizer

_CONTEXT_TOKENS = 4
_MAX_HELD_TOKENS = 64


class IncrementalDetokenizer:
    """Turns one request's tokens into pieces of text that, joined, are the text of all of them.

    A token may be part of a character, and its text may depend on the tokens before it (a leading space, say). So the
    new text is what the new tokens and a few before them decode to, beyond what those few alone decode to. Text that
    ends in an unfinished character is held back until it is whole, or `flush`.

    Cost: under a microsecond a token: the tokenizers library does the same in one native call (`DecodeStream`). Where
    that cannot go on, because too much is held back or a decoder changes its mind about text it has given, two
    decodings of a handful of tokens here.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._new: list[int] = []
        self._context = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        self._stream = tokenizer.decode_stream(self._context)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; often one piece, sometimes none."""
        self._new.append(token_id)
        if self._stream is None:
            return self._decode()
        try:
            text = self._stream(token_id)
        except Exception:  # What the library raises when text already given would have to change.
            return self._decode()
        if text is not None:
            self._end_piece()
            return text
        return "" if len(self._new) < _MAX_HELD_TOKENS else self._decode()

    def flush(self) -> str:
        """The text held back, with U+FFFD for the character that never became whole."""
        text = self._new_text() if self._new else ""
        self._new.clear()
        return text

    def _decode(self) -> str:
        """What the tokens held back give, without the stream, which starts again after them."""
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._new) < _MAX_HELD_TOKENS:
            self._stream = None
            return ""
        self._end_piece()
        self._stream = self._tokenizer.decode_stream(self._context)
        return text

    def _end_piece(self) -> None:
        self._context = (self._context + self._new)[-_CONTEXT_TOKENS:]
        self._new.clear()

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._new)[len(known) :]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text` may be given out; `stop` is the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first of some strings in a text that comes in pieces.

    Nothing that might be the beginning of a stop string is given out before it is known whether it is: at most the
    longest stop string less one character is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Take the next piece; what it releases."""
        if not self._stops:
            return StopMatch(text)
        held = self._held + text
        found = min(((place, stop) for stop in self._stops if (place := held.find(stop)) >= 0), default=None)
        if found is not None:
            self._held = ""
            return StopMatch(held[: found[0]], found[1])
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return StopMatch(held[: len(held) - keep])

    def flush(self) -> str:
        """What is still held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, `stop` itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
