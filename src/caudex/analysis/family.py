"""A family of prompts and the template behind it: fixed parts and the slots between them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from caudex.analysis.align import Span, differences, is_glue, lines_of, resemblance, similarity, weight

MIN_SIMILARITY = 0.5
MAX_SAMPLES = 32
FEW_LINES = 8
ANCHOR_CHARS = 200
MAX_FAMILIES = 8
MAX_REFERENCES = 16
MAX_FRUITLESS = 3
"""Of texts that begin alike, so many are tried as references where none of them shows a slot."""

_WORD_BEFORE = re.compile(r"[\w:.\-/+@]*$")
_WORD_AFTER = re.compile(r"[\w:.\-/+@]*")


@dataclass(frozen=True, slots=True)
class Template:
    """`literals[0] slot literals[1] slot ... literals[-1]`: what every member of a family has in common, in order."""

    literals: tuple[str, ...]

    @property
    def num_slots(self) -> int:
        return len(self.literals) - 1

    @property
    def fixed_chars(self) -> int:
        return sum(map(len, self.literals))

    def slot_start(self, slot: int) -> int:
        """Characters of fixed text before a slot."""
        return sum(map(len, self.literals[: slot + 1]))

    def values(self, text: str) -> list[str] | None:
        """What `text` has in each slot, or None where it is no member."""
        if not text.startswith(self.literals[0]) or not text.endswith(self.literals[-1]):
            return None
        values: list[str] = []
        position = len(self.literals[0])
        last = len(text) - len(self.literals[-1])
        for literal in self.literals[1:-1]:
            found = text.find(literal, position, last)
            if found < 0:
                return None
            values.append(text[position:found])
            position = found + len(literal)
        if position > last:
            return None
        values.append(text[position:last])
        return values

    def fill(self, values: list[str]) -> str:
        parts = [self.literals[0]]
        for value, literal in zip(values, self.literals[1:], strict=True):
            parts += (value, literal)
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Family:
    """A template and its members: each distinct text with how many requests carry it, most frequent first."""

    template: Template
    members: dict[str, int]


def recover_families(texts: Counter[str], *, open_end: bool = False) -> list[Family]:
    """Groups texts that are variants of one another, and gives each group of two or more its template.

    Greedy: the most frequent text left is the reference, and texts at least half like it are its family. A template is
    made from up to MAX_SAMPLES members and then tried on all of them; those it does not fit stay for the next round.
    With `open_end` texts are alike at their beginning only, and the last slot takes what follows (see `_open_ended`).
    """
    left = Counter(texts)
    families: list[Family] = []
    fruitless: Counter[str] = Counter()
    for _ in range(MAX_REFERENCES):
        if len(left) < 2 or len(families) == MAX_FAMILIES:
            break
        reference = left.most_common(1)[0][0]
        template = _template_of(reference, _differences_to_members(reference, left))
        if template is not None and open_end:
            template = _open_ended(template)
        fitting = {text: left[text] for text in left if template is not None and template.values(text) is not None}
        if template is not None and len(fitting) > 1:
            families.append(Family(template, dict(Counter(fitting).most_common())))
        elif open_end:
            fruitless[_opening(reference)] += 1
        tried_enough = {opening for opening, count in fruitless.items() if count >= MAX_FRUITLESS}
        for text in [*fitting, reference, *(text for text in left if tried_enough and _opening(text) in tried_enough)]:
            left.pop(text, None)
    return families


def _opening(text: str) -> str:
    return text[:ANCHOR_CHARS]


def _differences_to_members(reference: str, texts: Counter[str]) -> list[Span]:
    """Where up to MAX_SAMPLES texts that are like the reference, taken from all over, differ from it."""
    others = [text for text in texts if text != reference]
    step = max(1, -(-len(others) // MAX_SAMPLES))
    members = 0
    found: list[Span] = []
    lines = lines_of(reference)
    for text in (text for start in range(min(step, 2)) for text in others[start::step]):
        if members == MAX_SAMPLES:
            break
        if _may_resemble(reference, lines, text):
            spans = differences(reference, text)
            if similarity(reference, text, spans) >= MIN_SIMILARITY:
                found += spans
                members += 1
    return found


def _may_resemble(reference: str, lines: Counter[str], text: str) -> bool:
    """Whether a full comparison is worth its time. Texts of few lines are compared anyway: they differ within lines."""
    shorter, longer = sorted((len(text), len(reference)))
    if shorter < MIN_SIMILARITY * longer:
        return False
    return len(lines) < FEW_LINES or resemblance(lines, lines_of(text)) >= 0.5 * MIN_SIMILARITY


def _template_of(reference: str, differing: list[Span]) -> Template | None:
    """The parts of `reference` that no member changes, cut where any of them does."""
    spans = sorted((span.a_start, span.a_end) for span in differing)
    if not spans:
        return None
    merged: list[list[int]] = []
    for start, end in spans:
        if merged and (start <= merged[-1][1] or is_glue(reference[merged[-1][1] : start])):
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    widened = [_whole_words(reference, start, end) for start, end in merged]
    literals: list[str] = []
    position = 0
    for start, end in widened:
        if literals and start <= position:
            position = max(position, end)
            continue
        literals.append(reference[position:start])
        position = max(position, end)
    literals.append(reference[position:])
    return Template(_without_slight_literals(literals))


def _open_ended(template: Template) -> Template | None:
    """The template up to the beginning of its last long literal that has a slot before it, and a slot for all that
    follows. None where no fixed text comes behind a slot: what varies there is simply what is new."""
    last = max(
        (n for n, literal in enumerate(template.literals) if n > 0 and weight(literal) >= ANCHOR_CHARS), default=0
    )
    if not last:
        return None
    return Template((*template.literals[:last], template.literals[last][:ANCHOR_CHARS], ""))


def _whole_words(text: str, start: int, end: int) -> tuple[int, int]:
    before = _WORD_BEFORE.search(text, max(0, start - 32), start)
    after = _WORD_AFTER.match(text, end, end + 32)
    grows = start > 0 and end < len(text)
    if not grows:
        return start, end
    return (before.start() if before else start), (after.end() if after else end)


def _without_slight_literals(literals: list[str]) -> tuple[str, ...]:
    """A literal of a character or two between slots fits anywhere and anchors nothing: its slots become one."""
    anchors = [literal for literal in literals[1:-1] if len(literal.strip()) >= 2]
    return (literals[0], *anchors, *literals[-1:]) if len(literals) > 1 else tuple(literals)
