"""The same passages in another order: few-shot examples, retrieved documents, lists of rules.

A passage is a piece of text that many prompts have; where prompts have several of the same passages, one order for all
lets the next prompt use what the last one left. Sorting them by how often they occur puts the most shared first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from caudex.analysis.breakers.candidate import Candidate, Example, Place, Rewrite
from caudex.analysis.breakers.slots import Site, sites_of, texts_at
from caudex.analysis.corpus import by_session, head_length, text_of
from caudex.trace.request import Message, Request

MIN_PASSAGE_CHARS = 40
SEARCHED_CHARS = 1 << 15
"""A plain prompt's passages are looked for up to here."""

MIN_USES = 3
SHOWN_PASSAGES = 6
_LABEL = re.compile(
    r"^(\W*(?:example|document|doc|passage|source|context|item|case|q|#)?\W{0,3})(\d{1,4})(?=\W)", re.IGNORECASE
)
_BREAKS = (re.compile(r"(\n\s*\n+)"), re.compile(r"(?<=>)(\n)(?=<)"), re.compile(r"(\n)"))


def find_reordered(requests: list[Request]) -> Iterator[Candidate]:
    for site in sites_of(requests):
        if site.tool is not None:
            continue
        site = replace(site, chars=SEARCHED_CHARS)
        texts = texts_at(site, requests)
        if len(set(texts.values())) >= 2:
            yield from _passages_candidates(site, texts, requests)
    candidate = _examples_candidate(requests)
    if candidate is not None:
        yield candidate


def _without_label(passage: str) -> str:
    """A passage without its number ("Example 3:", "[2]"), which goes with the place and not with the passage."""
    return _LABEL.sub(r"\1#", passage, count=1).strip()


def _passages_candidates(site: Site, texts: dict[int, str], requests: list[Request]) -> Iterator[Candidate]:
    for pattern in _BREAKS:
        uses = _shared_passages(pattern, set(texts.values()))
        if len(uses) < 2:
            continue
        ranks = _ranks(uses, pattern, texts.values())
        reordered = [index for index, text in texts.items() if not _in_order(pattern, text, ranks)]
        candidate = _reorder_candidate(site, pattern, ranks, texts, reordered, requests) if reordered else None
        if candidate is not None:
            yield candidate


def _ranks(uses: Counter[str], pattern: re.Pattern[str], texts: Iterable[str]) -> dict[str, int]:
    """Passages by how many texts have them, the most first; of equals, as the texts have them from the first on."""
    met = dict.fromkeys(key for text in texts for p in pattern.split(text)[::2] if (key := _without_label(p)) in uses)
    return {passage: rank for rank, passage in enumerate(sorted(met, key=lambda passage: -uses[passage]))}


def _shared_passages(pattern: re.Pattern[str], texts: set[str]) -> Counter[str]:
    uses: Counter[str] = Counter()
    for text in texts:
        uses.update({_without_label(p) for p in pattern.split(text)[::2] if len(p) >= MIN_PASSAGE_CHARS})
    return Counter({passage: count for passage, count in uses.items() if count >= min(MIN_USES, len(texts))})


def _in_order(pattern: re.Pattern[str], text: str, ranks: dict[str, int]) -> bool:
    found = [ranks[key] for p in pattern.split(text)[::2] if (key := _without_label(p)) in ranks]
    return all(a < b for a, b in pairwise(found))


def _reorder_candidate(
    site: Site,
    pattern: re.Pattern[str],
    ranks: dict[str, int],
    texts: dict[int, str],
    reordered: list[int],
    requests: list[Request],
) -> Candidate | None:
    index = reordered[0]
    other = next((i for i in texts if texts[i] != texts[index]), None)
    if other is None:
        return None
    char = next((k for k, (a, b) in enumerate(zip(texts[index], texts[other], strict=False)) if a != b), 0)
    return Candidate(
        kind="few_shot_reordered" if site.role == "system" else "passages_reordered",
        title="The same passages in changing order",
        place=Place(f"{site.description}, character {char}", site.index, site.role, None, char),
        examples=_side_by_side(index, other, texts, pattern, ranks, requests),
        mend="Give passages (examples, retrieved documents) in one order for all requests: the most used first",
        rewrite=_sort_passages(site, pattern, ranks),
        pair=(index, other),
        details={"passages": len(ranks), "reordered": len(reordered)},
        min_gain=0.005,
    )


def _side_by_side(
    index: int,
    other: int,
    texts: dict[int, str],
    pattern: re.Pattern[str],
    ranks: dict[str, int],
    requests: list[Request],
) -> tuple[Example, ...]:
    moved = zip((index, other), _moved(index, other, texts, pattern, ranks), strict=True)
    return tuple(Example(requests[i].line, " / ".join(p.strip()[:40] for p in found)) for i, found in moved)


def _moved(
    index: int, other: int, texts: dict[int, str], pattern: re.Pattern[str], ranks: dict[str, int]
) -> tuple[list[str], list[str]]:
    """A few passages of two texts, from the first in which they differ on."""
    a, b = (_found(pattern, texts[i], ranks) for i in (index, other))
    start = next((n for n, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), 0)
    return a[start : start + SHOWN_PASSAGES], b[start : start + SHOWN_PASSAGES]


def _found(pattern: re.Pattern[str], text: str, ranks: dict[str, int]) -> list[str]:
    return [p for p in pattern.split(text)[::2] if _without_label(p) in ranks]


def _sort_passages(site: Site, pattern: re.Pattern[str], ranks: dict[str, int]) -> Rewrite:
    """Sorts the shared passages among the places they hold; numbers stay with the places, other text stays put."""

    def mend(request: Request) -> Request:
        text = site.text(request)
        if text is None:
            return request
        pieces = pattern.split(text)
        places = [k for k in range(0, len(pieces), 2) if _without_label(pieces[k]) in ranks]
        ordered = sorted((pieces[k] for k in places), key=lambda p: ranks[_without_label(p)])
        for number, (place, passage) in enumerate(zip(places, ordered, strict=True), start=1):
            pieces[place] = _LABEL.sub(rf"\g<1>{number}", passage, count=1)
        mended = "".join(pieces)
        return request if mended == text else site.with_text(request, mended)

    return lambda log: [mend(request) for request in log]


def _examples_candidate(requests: list[Request]) -> Candidate | None:
    """Few-shot examples given as turns (user, assistant) in front of the conversation.

    Conversations that begin with the same examples look like one where sessions are not logged; then every request
    that continues none begins one.
    """
    firsts = [indices[0] for indices in by_session(requests).values() if requests[indices[0]].messages]
    return _examples_among(firsts, requests) or _examples_among(_openings(requests), requests)


def _openings(requests: list[Request]) -> list[int]:
    """Requests that do not begin with all the messages of an earlier one."""
    openings: list[int] = []
    known: set[tuple[int, ...]] = set()
    lengths: set[int] = set()
    for index, request in enumerate(requests):
        turns = tuple(id(message) for message in request.messages or ())
        if not turns:
            continue
        if not any(turns[:length] in known for length in lengths if length <= len(turns)):
            openings.append(index)
        known.add(turns)
        lengths.add(len(turns))
    return openings


def _examples_among(firsts: list[int], requests: list[Request]) -> Candidate | None:
    uses: Counter[tuple[int, int]] = Counter()
    for index in firsts:
        uses.update(set(_turn_pairs(requests[index])))
    shared = {pair: count for pair, count in uses.items() if count >= MIN_USES}
    if len(shared) < 2:
        return None
    ranks = {pair: rank for rank, (pair, _) in enumerate(sorted(shared.items(), key=lambda item: -item[1]))}
    orders: dict[tuple[int, ...], int] = {}
    for index in firsts:
        found = tuple(ranks[pair] for pair in _turn_pairs(requests[index]) if pair in ranks)
        if len(found) >= 2:
            orders.setdefault(found, index)
    odd = [index for found, index in orders.items() if list(found) != sorted(found)]
    if len(orders) < 2 or not odd:
        return None
    other = next(index for index in orders.values() if index != odd[0])
    at = head_length(requests[odd[0]].messages or [])
    return Candidate(
        kind="few_shot_reordered",
        title="Few-shot examples in changing order",
        place=Place(f"message {at} (user), the first example turns", at, "user", None, 0),
        examples=tuple(
            Example(requests[i].line, text_of((requests[i].messages or [])[at])[:160]) for i in (odd[0], other)
        ),
        mend="Give the examples in one order for all requests",
        rewrite=lambda log: [_sort_examples(request, ranks) for request in log],
        pair=(odd[0], other),
        details={"examples": len(ranks), "orders": len(orders)},
    )


def _turn_pairs(request: Request) -> list[tuple[int, int]]:
    messages = request.messages or []
    turns = messages[head_length(messages) :]
    return [
        (id(a), id(b))
        for a, b in zip(turns[::2], turns[1::2], strict=False)
        if a.get("role") == "user" and b.get("role") == "assistant"
    ]


def _sort_examples(request: Request, ranks: dict[tuple[int, int], int]) -> Request:
    messages: list[Message] = list(request.messages or ())
    head = head_length(messages)
    pairs = _turn_pairs(request)
    places = [k for k, pair in enumerate(pairs) if pair in ranks]
    if len(places) < 2:
        return request
    blocks = {k: messages[head + 2 * k : head + 2 * k + 2] for k in places}
    for place, source in zip(places, sorted(places, key=lambda k: ranks[pairs[k]]), strict=True):
        messages[head + 2 * place : head + 2 * place + 2] = blocks[source]
    return replace(request, messages=messages)
