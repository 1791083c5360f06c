"""History breakers of plain prompts: their paragraphs are taken for turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from caudex.analysis.breakers.candidate import Candidate, Rewrite
from caudex.analysis.breakers.history import find_history_breakers
from caudex.analysis.corpus import Corpus
from caudex.trace.request import Request

_PARAGRAPH = re.compile(r"(?<=\n\n)(?=\S)")
_MAX_PARAGRAPHS = 4000


def find_plain_history_breakers(requests: list[Request]) -> Iterator[Candidate]:
    """As `find_history_breakers`, on prompts that are one text; the mended text is its paragraphs joined again."""
    if not any(_PARAGRAPH.search(request.text or "") for request in requests):
        return
    for candidate in find_history_breakers(_with_turns(requests)):
        place = replace(
            candidate.place, description=candidate.place.description.replace("message", "paragraph"), role=None
        )
        yield replace(
            candidate, place=place, rewrite=_joined(candidate.rewrite), min_gain=max(candidate.min_gain, 0.005)
        )


def _with_turns(requests: list[Request]) -> list[Request]:
    corpus = Corpus()
    for request in requests:
        if request.text is not None:
            paragraphs = _PARAGRAPH.split(request.text, maxsplit=_MAX_PARAGRAPHS)
            turns = [{"role": "text", "content": paragraph} for paragraph in paragraphs]
            request = replace(request, messages=turns, text=None)
        corpus.add(request)
    return corpus.requests


def _joined(rewrite: Rewrite) -> Callable[[list[Request]], list[Request]]:
    def mend(requests: list[Request]) -> list[Request]:
        mended = rewrite(_with_turns(requests))
        return [
            request
            if request.text is None
            else replace(request, text="".join(turn["content"] for turn in turned.messages or ()))
            for request, turned in zip(requests, mended, strict=True)
        ]

    return mend
