"""Token ids as text, so that what looks for breakers in text works on logs that hold ids only.

Each distinct id is given one character of Unicode's private planes, which is neither a letter nor a blank: a prompt is
a string of one character a token, and differences, templates and slots are found in it as in any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from caudex.analysis.align import FIRST_TOKEN_CHARACTER
from caudex.analysis.breakers.candidate import Candidate, Example
from caudex.trace.request import Request
from caudex.trace.tokenizer import TokenArray, Tokenizer

FIRST_CHARACTER = ord(FIRST_TOKEN_CHARACTER)
MAX_DISTINCT = 0x10FFFD - FIRST_CHARACTER
SHOWN_IDS = 12
_TABLE_SIZE = 1 << 20
"""Ids below this, which all vocabularies' are, have their characters in a table; others are looked up one by one."""


class TokenText:
    """A two-way mapping between ids and characters; it is itself the tokenizer of the text that it makes.

    With the tokenizer that the ids are from (`reader`), values are read and shown as the text they stand for.
    """

    name = "token ids"
    description = "token ids as logged"
    markers: tuple[str, ...] = ()
    prefix: TokenArray = np.zeros(0, dtype=np.int32)

    def __init__(self, reader: Tokenizer | None = None) -> None:
        self._reader = reader
        self._code_of_id: dict[int, int] = {}
        self._table = np.zeros(_TABLE_SIZE, dtype=np.uint32)
        self._ids: list[int] = []

    def requests(self, requests: list[Request]) -> list[Request] | None:
        """The requests with text in place of ids; None where the log has more distinct ids than characters."""
        turned = [replace(request, text=self._text(request.token_ids or []), token_ids=None) for request in requests]
        return turned if len(self._ids) <= MAX_DISTINCT else None

    def _text(self, ids: Sequence[int]) -> str:
        tokens = np.asarray(ids, dtype=np.int32)
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= _TABLE_SIZE):
            return "".join(map(chr, map(self._code, tokens.tolist())))
        codes = self._table[tokens]
        if not codes.all():
            for token in np.unique(tokens[codes == 0]).tolist():
                self._table[token] = self._code(token)
            codes = self._table[tokens]
        return codes.tobytes().decode("utf-32-le")

    def _code(self, token: int) -> int:
        code = self._code_of_id.get(token)
        if code is None:
            self._code_of_id[token] = code = FIRST_CHARACTER + len(self._ids) % MAX_DISTINCT
            self._ids.append(token)
        return code

    def encode_batch(self, texts: list[str]) -> list[TokenArray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> TokenArray:
        """Characters of the mapping become their ids; what a mend put in ("…", a line break) gets ids below zero."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
        known = codes >= FIRST_CHARACTER
        ids = np.where(known, 0, -1 - codes)
        table = np.asarray(self._ids or [0], dtype=np.int64)
        ids[known] = table[codes[known] - FIRST_CHARACTER]
        return ids.astype(np.int32)

    def decode(self, tokens: TokenArray) -> str:
        return " ".join(map(str, tokens.tolist()))

    def read(self, text: str) -> str:
        """What a person would read; the text itself where no tokenizer is known."""
        if self._reader is None:
            return text
        ids = [self._ids[ord(c) - FIRST_CHARACTER] for c in text if ord(c) >= FIRST_CHARACTER]
        return self._reader.decode(np.asarray(ids, dtype=np.int32))

    def shown(self, candidate: Candidate) -> Candidate:
        """A candidate whose values and place are told in ids and tokens."""
        place = candidate.place
        examples = tuple(
            Example(e.line, self._shown(e.value) or e.value, self._shown(e.before[-6:]), self._shown(e.after[:6]))
            for e in candidate.examples
        )
        description = place.description.replace("character", "token")
        return replace(
            candidate, examples=examples, place=replace(place, description=description, char=None), rule=None
        )

    def _shown(self, text: str) -> str:
        if self._reader is not None:
            return self.read(text)
        ids = [str(self._ids[ord(c) - FIRST_CHARACTER]) for c in text if ord(c) >= FIRST_CHARACTER]
        return " ".join(ids[:SHOWN_IDS]) + (" …" if len(ids) > SHOWN_IDS else "")
