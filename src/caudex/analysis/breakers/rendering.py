"""Chat templates that render an earlier turn otherwise once later turns follow it (reasoning left out, mostly).

The messages only grow, and still the prompt changes in its middle: it shows in the rendered text alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from caudex.analysis.breakers.candidate import Candidate, Example, Place
from caudex.analysis.breakers.edits import has_reasoning
from caudex.analysis.corpus import by_session
from caudex.trace.encode import PromptEncoder
from caudex.trace.errors import TraceError
from caudex.trace.request import Request

MAX_TRANSITIONS = 200
GENERATION_PROMPT_CHARS = 120
"""A prompt ends with the opening of the turn to be generated, which need not come back."""


def find_template_breakers(requests: list[Request], encoder: PromptEncoder) -> Iterator[Candidate]:
    if encoder.renderer.template is None:
        return
    for previous, following in _growing_pairs(requests):
        try:
            before, after = (encoder.renderer.render(requests[index]) for index in (previous, following))
        except TraceError:
            continue
        at = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        if len(before) - at > GENERATION_PROMPT_CHARS:
            yield _candidate(requests, encoder, previous, following, before, after, at)
            return


def _growing_pairs(requests: list[Request]) -> Iterator[tuple[int, int]]:
    """Pairs of requests of a session of which the second repeats the first's messages and adds to them; those with
    reasoning first, since templates strip that."""
    pairs = [
        (a, b)
        for indices in by_session(requests).values()
        for a, b in pairwise(indices)
        if _repeats(requests[a], requests[b])
    ]
    pairs.sort(key=lambda pair: not any(has_reasoning(message) for message in requests[pair[0]].messages or ()))
    yield from pairs[:MAX_TRANSITIONS]


def _repeats(first: Request, second: Request) -> bool:
    sent, turns = first.messages or [], second.messages or []
    return 0 < len(sent) < len(turns) and all(a is b for a, b in zip(sent, turns, strict=False))


def _candidate(
    requests: list[Request], encoder: PromptEncoder, previous: int, following: int, before: str, after: str, at: int
) -> Candidate:
    reasoning = any(has_reasoning(message) for message in requests[previous].messages or ())
    stand_in = encoder.renderer.stand_in
    shown = ((previous, before), (following, after))
    return Candidate(
        kind="reasoning_stripped" if reasoning else "template_rewrites_history",
        title="The chat template " + ("strips reasoning from" if reasoning else "rewrites") + " earlier turns",
        place=Place(f"rendered prompt, character {at}", char=at),
        examples=tuple(Example(requests[i].line, text[at : at + 160], text[max(0, at - 48) : at]) for i, text in shown),
        mend="Use a template that renders a turn the same way for as long as the conversation lasts",
        rewrite=lambda log: [
            request if request.messages is None else replace(request, text=stand_in.render(request), messages=None)
            for request in log
        ],
        pair=(previous, following),
        details={"by": "template", "mended_with": stand_in.description},
        min_gain=0.005,
    )
