"""The same passages in another order: few-shot examples, retrieved documents, lists of rules.

A passage is a piece of text that many prompts have; where prompts have several of the same passages, one order for all
lets the next prompt use what the last one left. Sorting them by how often they occur puts the most shared first.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TypeAlias

from caudex.analysis.align import CHARS_PER_TOKEN, common_start, is_unread, weight
from caudex.analysis.breakers.candidate import Candidate, Example, Place, Rewrite
from caudex.analysis.breakers.sites import Site, sites_of, texts_at
from caudex.analysis.breakers.unitigs import Cutter
from caudex.analysis.corpus import by_session, head_length, text_of
from caudex.trace.request import Message, Request

MIN_PASSAGE_CHARS = 40
MIN_LINE_CHARS = 16
SEARCHED_CHARS = 1 << 15
"""A plain prompt's passages are looked for up to here."""

CUT_SAMPLES = 80
"""Of token ids, so many prompts tell where all of them are cut."""

MIN_ALIKE = 0.002
CUT_GRAMS = (6, 12, 24, 40)
"""Token ids are cut by k-grams of several lengths, since passages of any length may hold stretches that recur."""

MIN_USES = 3
MAX_TRIED_PAIRS = 64
SHOWN_PASSAGES = 6
_LABEL = re.compile(
    r"(\W*(?:example|document|doc|passage|source|context|item|case|q|#)?\W{0,3})(\d{1,4})(?=\W)", re.IGNORECASE
)
_BREAKS = (
    (re.compile(r"(\n\s*\n+)"), MIN_PASSAGE_CHARS),
    (re.compile(r"(\n+)(?=#{1,6} )"), MIN_LINE_CHARS),
    (re.compile(r"(?<=>)(\n)(?=<)"), MIN_PASSAGE_CHARS),
    (re.compile(r"(\n)"), MIN_LINE_CHARS),
)
"""Paragraphs, sections under a heading, elements of XML, lines; and how long one is that is a passage."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A way to cut texts into pieces, each but the last followed by what stands between it and the next; and how long a
    piece must be to be a passage."""

    cut: Callable[[str], list[str]]
    min_chars: int


def find_reordered(requests: list[Request]) -> Iterator[Candidate]:
    for site in sites_of(requests):
        if site.tool is not None:
            continue
        site = replace(site, chars=SEARCHED_CHARS)
        texts = texts_at(site, requests)
        if any(map(is_unread, texts.values())):
            texts = dict(list(texts.items())[:: -(-len(texts) // CUT_SAMPLES)])
        if len(set(texts.values())) >= 2:
            for split in _splits(texts):
                order = _Order.of(texts, split, requests)
                if order is not None and order.brings_alike(texts):
                    yield from _reorder_candidate(site, order, texts, requests)
    candidate = _examples_candidate(requests)
    if candidate is not None:
        yield candidate


def _splits(texts: dict[int, str]) -> Iterator[_Split]:
    """Ways to cut texts into passages: at what separates them, or, of token ids, wherever their order varies."""
    if not any(map(is_unread, texts.values())):
        yield from (_Split(pattern.split, least) for pattern, least in _BREAKS)
        return
    for k in CUT_GRAMS:
        yield _Split(_cutting(Cutter(texts.values(), k)), min(CHARS_PER_TOKEN * k, MIN_PASSAGE_CHARS))


def _cutting(cutter: Cutter) -> Callable[[str], list[str]]:
    """The pieces of a text, with nothing between them."""
    return lambda text: list(chain.from_iterable((piece, "") for piece in cutter.cut(text)))[:-1]


def _without_label(passage: str) -> str:
    """A passage without its number ("Example 3:", "[2]"), which goes with the place and not with the passage."""
    if is_unread(passage):
        return passage
    label = _LABEL.match(passage)
    return (f"{label[1]}#{passage[label.end() :]}" if label else passage).strip()


@dataclass(frozen=True, slots=True)
class _Order:
    """One order for the passages that many conversations have: by how many have them, the most first; of equals, as the
    texts have them from the first on. `found` are each text's passages (by request), in its own order."""

    split: _Split
    ranks: dict[str, int]
    found: dict[int, list[str]]

    @staticmethod
    def of(texts: dict[int, str], split: _Split, requests: list[Request]) -> _Order | None:
        """None where no two passages are shared, or no text has them in another order."""
        keys = {
            index: [_without_label(piece) for piece in split.cut(text) if weight(piece) >= split.min_chars]
            for index, text in texts.items()
        }
        users: dict[str, set[str | int]] = defaultdict(set)
        repeated: set[str] = set()
        for index, found in keys.items():
            for key in dict.fromkeys(found):
                users[key].add(requests[index].session or index)
            repeated.update(key for key, count in Counter(found).items() if count > 1)
        least = min(MIN_USES, len(set(texts.values())))
        shared = [key for key, using in users.items() if len(using) >= least and key not in repeated]
        ranks = {key: rank for rank, key in enumerate(sorted(shared, key=lambda key: -len(users[key])))}
        in_order = {index: [key for key in found if key in ranks] for index, found in keys.items()}
        return _Order(split, ranks, in_order) if len(ranks) > 1 else None

    def is_kept_by(self, index: int) -> bool:
        return all(self.ranks[a] < self.ranks[b] for a, b in pairwise(self.found[index]))

    def sorted(self, text: str) -> str:
        """Sorts the shared passages among the places they hold; numbers stay with the places, other text stays put, and
        what blanks a passage brought along go: one kind of gap is between all."""
        pieces = self.split.cut(text)
        ranks = {
            place: rank
            for place, piece in enumerate(pieces)
            if (rank := self.ranks.get(_without_label(piece))) is not None
        }
        passages = [pieces[place] for place in sorted(ranks, key=ranks.__getitem__)]
        for number, (place, passage) in enumerate(zip(ranks, passages, strict=True), start=1):
            label = _LABEL.match(passage)
            numbered = f"{label[1]}{number}{passage[label.end() :]}" if label else passage
            pieces[place] = numbered if is_unread(passage) else numbered.strip()
        gaps = [place + 1 for place in ranks if place + 1 < len(pieces) and pieces[place + 1].isspace()]
        usual = Counter(pieces[gap] for gap in gaps).most_common(1)
        for gap in gaps:
            pieces[gap] = usual[0][0]
        return "".join(pieces)

    def brings_alike(self, texts: dict[int, str]) -> bool:
        """Whether texts that follow one another would begin alike for longer: a cheap guess at what a replay says."""
        before = list(texts.values())
        after = [text if self.is_kept_by(index) else self.sorted(text) for index, text in texts.items()]
        gain = sum(common_start(*pair) for pair in pairwise(after)) - sum(common_start(*p) for p in pairwise(before))
        return gain > MIN_ALIKE * sum(map(len, before))


def _reorder_candidate(
    site: Site, order: _Order, texts: dict[int, str], requests: list[Request]
) -> Iterator[Candidate]:
    reordered = [index for index in texts if not order.is_kept_by(index)]
    pair = _pair_in_two_orders(order, reordered)
    if pair is None:
        return
    (index, a), (other, b) = pair
    char = common_start(texts[index], texts[other])
    yield Candidate(
        kind="few_shot_reordered" if site.role == "system" else "passages_reordered",
        title="The same passages in changing order",
        place=Place(f"{site.description}, character {char}", site.index, site.role, None, char),
        examples=tuple(
            Example(requests[i].line, " / ".join(p[:40] for p in found[:SHOWN_PASSAGES]))
            for i, found in ((index, a), (other, b))
        ),
        mend="Give passages (examples, retrieved documents) in one order for all requests: the most used first",
        rewrite=_sort_passages(site, order),
        pair=(index, other),
        details={"passages": len(order.ranks), "reordered": len(reordered)},
        min_gain=0.005,
    )


_InOrder: TypeAlias = tuple[int, list[str]]
"""A request's index, and some of its passages from the first that moved on."""


def _pair_in_two_orders(order: _Order, reordered: list[int]) -> tuple[_InOrder, _InOrder] | None:
    """Two requests that have some passages in common and in different orders; None where there are none."""
    for index in reordered[:MAX_TRIED_PAIRS]:
        for other in list(order.found)[:MAX_TRIED_PAIRS]:
            a, b = order.found[index], order.found[other]
            common = set(a) & set(b)
            a, b = ([key for key in found if key in common] for found in (a, b))
            start = common_start(a, b)
            if start < len(a):
                return (index, a[start:]), (other, b[start:])
    return None


def _sort_passages(site: Site, order: _Order) -> Rewrite:
    def mend(request: Request) -> Request:
        text = site.text(request)
        mended = text and order.sorted(text)
        return request if not mended or mended == text else site.with_text(request, mended)

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
