"""History breakers of plain prompts: their paragraphs are taken for turns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from caudex.analysis.breakers.candidate import Candidate, Rewrite
from caudex.analysis.breakers.history import find_history_breakers
from caudex.analysis.corpus import Corpus
from caudex.trace.request import Request

_PARAGRAPH = re.compile(r"(?<=\n\n)(?=\S)")
_MAX_PARAGRAPHS = 4000
_COMMON_SHARE = 0.5


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
    """The requests with their paragraphs as turns. Paragraphs that most prompts have are the template's, and do not
    tell which conversation a prompt without a session goes on with."""
    texts = [None if request.text is None else _paragraphs(request.text) for request in requests]
    uses = Counter(paragraph for paragraphs in texts if paragraphs is not None for paragraph in set(paragraphs))
    corpus = Corpus(common={paragraph for paragraph, count in uses.items() if count > _COMMON_SHARE * len(requests)})
    for request, paragraphs in zip(requests, texts, strict=True):
        if paragraphs is not None:
            turns = [{"role": "text", "content": paragraph} for paragraph in paragraphs]
            request = replace(request, messages=turns, text=None)
        corpus.add(request)
    return corpus.requests


def _paragraphs(text: str) -> list[str]:
    return _PARAGRAPH.split(text, maxsplit=_MAX_PARAGRAPHS)


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
