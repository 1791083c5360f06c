"""Where two texts that were meant to be alike differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

import numpy as np

FIRST_TOKEN_CHARACTER = "\U000f0000"
"""From here on characters stand for token ids, of which nothing is known (see `caudex.analysis.token_text`)."""

CHARS_PER_TOKEN = 4
_WORD = re.compile(r"\s*\w+|\s*[^\w\s]|\s+")
_MAX_WORDS = 400
_MAX_LINES = 4000
_MAX_PAIRS_A_WORD = 20
_MAX_PAIRS_A_PIECE = 2
_GLUE = re.compile(r"[\w:.,\-/+@#]{0,4}|[ ]")


_VALUE_MARKS = "_:.-/+"
_MAX_GROWTH = 40


def value_start(text: str, at: int) -> int:
    """Where the value (an id, a time, a word) begins that reaches up to `at`."""
    lowest = max(0, at - _MAX_GROWTH)
    while at > lowest and (text[at - 1].isalnum() or text[at - 1] in _VALUE_MARKS):
        at -= 1
    return at


def value_end(text: str, at: int) -> int:
    """Where the value that begins before `at` ends; one in base64 may end in `=`."""
    while at < len(text) and (text[at].isalnum() or text[at] in _VALUE_MARKS + "="):
        at += 1
    return at


class Span(NamedTuple):
    """Text `a[a_start:a_end]` stands where the other has `b[b_start:b_end]`; either may be empty."""

    a_start: int
    a_end: int
    b_start: int
    b_end: int


def differences(a: str, b: str) -> list[Span]:
    """The spans in which `a` and `b` differ, in order, by lines first and by words inside what lines leave.

    O(n) where one place differs, which is what a planted value looks like; else difflib on lines, then on words, where
    what lines leave is short: longer stretches are one span.
    """
    if a == b:
        return []
    start = common_start(a, b)
    end = _longest(lambda count: a[len(a) - count :] == b[len(b) - count :], min(len(a), len(b)) - start)
    inner_a, inner_b = a[start : len(a) - end], b[start : len(b) - end]
    spans = _by_lines(inner_a, inner_b)
    return [Span(s.a_start + start, s.a_end + start, s.b_start + start, s.b_end + start) for s in spans]


def _longest(agree: Callable[[int], bool], limit: int) -> int:
    """The largest count up to `limit` for which `agree` holds; bisected, since slices compare in C."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if agree(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _by_lines(a: str, b: str) -> list[Span]:
    lines_a, lines_b = _lines(a), _lines(b)
    if len(lines_a) <= 1 or len(lines_b) <= 1 or max(len(lines_a), len(lines_b)) > _MAX_LINES:
        return _by_words(a, b, 0, 0)
    if "\n" not in a and not _is_soon_aligned(lines_a, lines_b, _MAX_PAIRS_A_PIECE):
        return [Span(0, len(a), 0, len(b))]
    spans: list[Span] = []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, lines_a, lines_b, autojunk=False).get_opcodes():
        if tag != "equal":
            offset_a, offset_b = sum(map(len, lines_a[:i1])), sum(map(len, lines_b[:j1]))
            spans.extend(_by_words("".join(lines_a[i1:i2]), "".join(lines_b[j1:j2]), offset_a, offset_b))
    return spans


def _lines(text: str) -> list[str]:
    """Lines; of a long text without any, pieces of about 16 characters that begin where the text itself says (content-
    defined chunks), so that both sides are cut alike."""
    lines = text.splitlines(keepends=True)
    if len(lines) > 1 or len(text) <= _MAX_WORDS:
        return lines
    cuts = places_divisible(text, 16)
    return [text[start:end] for start, end in pairwise([0, *(cut for cut in cuts if cut), len(text)])]


def places_divisible(text: str, divisor: int) -> list[int]:
    """Where the characters are whose code the divisor divides: places that texts with the same stretch agree on."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    places: list[int] = np.flatnonzero(codes % divisor == 0).tolist()
    return places


def _by_words(a: str, b: str, offset_a: int, offset_b: int) -> list[Span]:
    words_a, words_b = _WORD.findall(a), _WORD.findall(b)
    few = max(len(words_a), len(words_b)) <= _MAX_WORDS
    if not words_a or not words_b or not few or not _is_soon_aligned(words_a, words_b, _MAX_PAIRS_A_WORD):
        return [Span(offset_a, offset_a + len(a), offset_b, offset_b + len(b))]
    spans: list[Span] = []
    at_a = _offsets(words_a, offset_a)
    at_b = _offsets(words_b, offset_b)
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, words_a, words_b, autojunk=False).get_opcodes():
        if tag != "equal":
            spans.append(Span(at_a[i1], at_a[i2], at_b[j1], at_b[j2]))
    return spans


def _is_soon_aligned(a: list[str], b: list[str], max_pairs: int) -> bool:
    """Whether difflib is done soon: it looks at every pair of equal words again for each piece that it finds, so that
    a text of few words repeated over and over takes it minutes."""
    counts = Counter(b)
    return sum(counts[word] for word in a) <= max_pairs * (len(a) + len(b))


def _offsets(words: list[str], start: int) -> list[int]:
    offsets = [start]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    return offsets


def similarity(a: str, b: str, spans: list[Span]) -> float:
    """Share of the longer text that the two have in common, given their differences."""
    longest = max(len(a), len(b), 1)
    return 1.0 - max(sum(s.a_end - s.a_start for s in spans), sum(s.b_end - s.b_start for s in spans)) / longest


def resemblance(a: Counter[str], b: Counter[str]) -> float:
    """Share of the longer text's characters whose lines the other has too, from `lines_of` each: a cheap upper guess
    of `similarity` for texts that differ by lines."""
    common = sum(len(line) * count for line, count in (a & b).items())
    longest = max(sum(len(line) * count for line, count in side.items()) for side in (a, b))
    return common / max(longest, 1)


def lines_of(text: str) -> Counter[str]:
    return Counter(text.splitlines(keepends=True))


def common_start(a: Sequence[object], b: Sequence[object]) -> int:
    """How many items (or characters) the two begin with alike."""
    if isinstance(a, str) and isinstance(b, str):
        return _longest(lambda count: a[:count] == b[:count], min(len(a), len(b)))
    return next((count for count, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def common_end(a: str, b: str) -> int:
    """How many characters the two end with alike."""
    return _longest(lambda count: a[len(a) - count :] == b[len(b) - count :], min(len(a), len(b)))


def weight(text: str) -> int:
    """How much text this is, in characters: one that stands for a token id counts for the four that a token is of."""
    tokens = bool(text) and min(text[0], text[-1]) >= FIRST_TOKEN_CHARACTER
    return CHARS_PER_TOKEN * len(text) if tokens else len(text)


def is_unread(text: str) -> bool:
    """Whether this is token ids, of which no word is known."""
    return text[:1] >= FIRST_TOKEN_CHARACTER


def is_glue(text: str) -> bool:
    """Whether text between two differing spans is so slight that both are parts of one value (`10:` and `:07`)."""
    return len(text) <= 4 and _GLUE.fullmatch(text) is not None
