"""Values that change inside text that was meant to be the same: clocks, ids, names, versions, drifting whitespace.

Looks at the operator's text (system messages, tool declarations) and, for what is behind the first varying value there,
at the opening of conversations. Text that is equal but for a few places is one family; its template tells the places.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

from caudex.analysis.align import weight
from caudex.analysis.breakers.appended import append_values
from caudex.analysis.breakers.candidate import Candidate, Example, Place, Rewrite
from caudex.analysis.breakers.sites import Site, sites_of, texts_at
from caudex.analysis.breakers.values import ValueKind, ValueUse, classify, may_be_part_of_a_clock
from caudex.analysis.corpus import text_of
from caudex.analysis.family import Family, recover_families
from caudex.trace.request import Message, Request

MAX_VERSIONS = 12
MAX_VERSIONS_UNTOLD = 4
"""As many where the log does not tell one conversation from another, or where they differ in figures only: more may be
what each of them is about, or a count."""

MAX_VERSION_CHARS = 4000
MIN_REQUESTS_A_VERSION = 3
MIN_FIXED_CHARS_BEHIND = 200
CONTEXT_CHARS = 48
CONTEXT_READ = 80
MAX_CHARS_WITHIN_A_CLOCK = 24

TITLES = {
    "clock": "A clock in the prompt",
    "request_id": "A request id or random value in the prompt",
    "request_counter": "A request counter in the prompt",
    "session_id": "A session's id in front of shared text",
    "user_name": "A user's name in front of shared text",
    "tenant_name": "A tenant's name in front of shared text",
    "varying_value": "Requests diverge at one place",
    "system_prompt_versions": "Several versions of one prompt",
    "whitespace_drift": "Whitespace or formatting drifts",
}
MENDS = {
    "clock": "Take the clock out of the {where}: give the time in the last message, or from a tool",
    "request_id": "Take the id out of the {where}: the model has no use for it; send it as a header or as metadata",
    "request_counter": "Take the counter out of the {where}; send it as a header or as metadata",
    "session_id": "Move the session's id out of the {where}: into the first user message, or out of the prompt",
    "user_name": "Move what names the user behind the shared text: into the first user message",
    "tenant_name": "Move what names the tenant behind the shared text: into the first user message",
    "varying_value": "Move what varies behind what does not: append it to what is sent when it changes, and leave it",
}


def find_slots(requests: list[Request], read: Callable[[str], str]) -> Iterator[Candidate]:
    """`read` turns text of the requests into what a person would read (token ids decoded)."""
    yield from find_slots_at(sites_of(requests), requests, read)


def find_slots_at(sites: list[Site], requests: list[Request], read: Callable[[str], str]) -> Iterator[Candidate]:
    for site in sites:
        texts = texts_at(site, requests)
        if len(set(texts.values())) < 2:
            continue
        drift = _whitespace_drift(site, texts, requests)
        if drift is not None:
            yield drift
        for family in recover_families(Counter(texts.values()), open_end=site.role is None and site.tool is None):
            yield from _family_candidates(site, family, texts, requests, read)


_PLAIN_MARKS = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "−": "-"})
_UNSEEN_MARKS = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff]")


def normal_form(text: str) -> str:
    """A text without what carries no meaning: whitespace, marks that do not show (a byte order mark, a soft hyphen),
    Unicode forms, kinds of quotes and dashes, list markers, case."""
    text = unicodedata.normalize("NFKC", _UNSEEN_MARKS.sub("", html.unescape(text))).translate(_PLAIN_MARKS)
    lines = ("".join(line.casefold().split()) for line in text.splitlines())
    return "".join(line.lstrip("-*•") for line in lines)


def _whitespace_drift(site: Site, texts: dict[int, str], requests: list[Request]) -> Candidate | None:
    if not site.is_operators:
        return None
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    for text in texts.values():
        groups[normal_form(text)][text] += 1
    canonical = {text: group.most_common(1)[0][0] for group in groups.values() for text in group}
    if len(set(canonical.values())) == len(canonical):
        return None
    form, variants = max(groups.items(), key=lambda item: len(item[1]))
    shown = [text for text, _ in variants.most_common(2)]
    lines = [next(i for i, text in texts.items() if text == variant) for variant in shown]
    char = _first_difference(shown[0], shown[1])
    return Candidate(
        kind="whitespace_drift",
        title=TITLES["whitespace_drift"],
        place=Place(f"{site.description}, character {char}", site.index, site.role, site.tool, char),
        examples=tuple(
            Example(requests[i].line, repr(text[char : char + 16]), text[max(0, char - CONTEXT_CHARS) : char])
            for i, text in zip(lines, shown, strict=True)
        ),
        mend=f"Render the {site.description} one way: the same line ends, blanks and list markers in every request",
        rewrite=_rewrite_texts(site, canonical),
        pair=(lines[0], lines[1]),
        rule={"rule": "normalize_whitespace", "site": site.description},
        details={"variants": len(variants), "normal_form_chars": len(form)},
    )


def _rewrite_texts(site: Site, canonical: dict[str, str]) -> Rewrite:
    def rewrite(requests: list[Request]) -> list[Request]:
        mended = []
        for request in requests:
            text = site.text(request)
            target = None if text is None else canonical.get(text)
            mended.append(request if target is None else site.with_text(request, target))
        return mended

    return rewrite


Row: TypeAlias = tuple[int, str, list[str]]
"""A request's index, its text, and what it has in each slot of its family's template."""


def _family_candidates(
    site: Site, family: Family, texts: dict[int, str], requests: list[Request], read: Callable[[str], str]
) -> Iterator[Candidate]:
    rows = [(i, text, values) for i, text in texts.items() if (values := family.template.values(text)) is not None]
    kinds = _kinds_of_slots(site, family, rows, requests, read)
    unknown = [slot for slot, kind in kinds.items() if kind.kind == "varying_value"]
    known: dict[str, list[int]] = defaultdict(list)
    for slot, kind in kinds.items():
        if slot not in unknown:
            known[kind.kind].append(slot)
    for slots in known.values():
        yield _slot_candidate(site, family, slots, kinds[slots[0]], rows, requests)
    if not unknown:
        return
    versions = _versions(site, unknown, rows, requests)
    if versions is not None:
        candidate = _versions_candidate(site, family, unknown, rows, requests, versions)
        yield _as_drift(candidate) if _differ_in_form_only(versions, read) else candidate
    else:
        yield _slot_candidate(site, family, unknown, ValueKind("varying_value", False), rows, requests)


def _differ_in_form_only(versions: Iterable[Version], read: Callable[[str], str]) -> bool:
    return len({normal_form(" ".join(map(read, version))) for version in versions}) == 1


def _as_drift(versions: Candidate) -> Candidate:
    """Versions of a text that say the same: whitespace or formatting drifts, and one form for all mends it."""
    return replace(
        versions,
        kind="whitespace_drift",
        title=TITLES["whitespace_drift"],
        mend="Render the prompt one way: the same line ends, blanks, quotes and list markers in every request",
    )


Version: TypeAlias = tuple[str, ...]
"""What a text has in the slots that tell its versions apart."""


def _versions(site: Site, slots: list[int], rows: list[Row], requests: list[Request]) -> Counter[Version] | None:
    """How many requests have each version of a text, by what it has in `slots`; None where what varies is no version:
    there are too many, or each belongs to one conversation."""
    if not site.is_operators and site.role is not None:
        return None
    counts = Counter(_version(values, slots) for _, _, values in rows)
    common = {version for version, count in counts.items() if count >= MIN_REQUESTS_A_VERSION}
    if len(counts) > MAX_VERSIONS or len(common) < 2 or _longest_value(counts) > MAX_VERSION_CHARS:
        return None
    if len(counts) > MAX_VERSIONS_UNTOLD and all(value.strip().isdecimal() for version in counts for value in version):
        return None
    sessions: dict[Version, set[str]] = defaultdict(set)
    for index, _, values in rows:
        sessions[_version(values, slots)].add(requests[index].session or "")
    known = len(set().union(*sessions.values())) > 1
    shared = sum(len(sessions[version]) > 1 for version in common)
    return counts if shared >= 2 or (not known and len(counts) <= MAX_VERSIONS_UNTOLD) else None


def _longest_value(versions: Iterable[Version]) -> int:
    return max(len(value) for version in versions for value in version)


def _version(values: list[str], slots: list[int]) -> Version:
    return tuple(values[slot] for slot in slots)


def _kinds_of_slots(
    site: Site, family: Family, rows: list[Row], requests: list[Request], read: Callable[[str], str]
) -> dict[int, ValueKind]:
    """The kind of each slot that varies and has enough fixed text behind it; numbers in one line are of one kind: a
    clock where they are one when read together (a weekday, a day, a time), or figures of no known kind."""
    literals = family.template.literals

    def kind_of(first: int, last: int) -> ValueKind:
        uses = _uses(rows, literals, first, last, requests, read)
        return classify(uses, read(literals[first][-CONTEXT_READ:]), read(literals[last + 1][:CONTEXT_READ]))

    kinds: dict[int, ValueKind] = {}
    varying = [slot for slot in range(family.template.num_slots) if len({values[slot] for _, _, values in rows}) > 1]
    for slot in varying:
        if site.is_operators or sum(map(weight, literals[slot + 1 :])) >= MIN_FIXED_CHARS_BEHIND:
            kinds[slot] = kind_of(slot, slot)
    for first, last in _stretches(varying, literals):
        parts = [slot for slot in varying if first <= slot <= last and slot in kinds]
        read_together = kind_of(first, last)
        found = {kinds[slot].kind for slot in parts}
        if read_together.kind == "clock":
            dated = [s for s in parts if may_be_part_of_a_clock({read(values[s]) for _, _, values in rows})]
            kinds.update(dict.fromkeys(dated, read_together))
        elif "varying_value" in found and found <= _FIGURES:
            kinds.update(dict.fromkeys(parts, ValueKind("varying_value", read_together.per_session)))
    return kinds


_FIGURES = frozenset({"varying_value", "request_id", "request_counter"})


def _uses(
    rows: list[Row],
    literals: tuple[str, ...],
    first: int,
    last: int,
    requests: list[Request],
    read: Callable[[str], str],
) -> list[ValueUse]:
    """What each request has from slot `first` to slot `last`, with the fixed text between them."""
    uses = []
    for index, _, values in rows:
        parts = [values[first]]
        for slot in range(first + 1, last + 1):
            parts += (literals[slot], values[slot])
        request = requests[index]
        uses.append(ValueUse(read("".join(parts)), request.session, request.tenant, request.timestamp))
    return uses


def _stretches(slots: list[int], literals: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Runs of two slots or more with little text and no line's end between them, as (first, last)."""
    start = 0
    for at in range(1, len(slots) + 1):
        if at < len(slots):
            between = "".join(literals[slots[at - 1] + 1 : slots[at] + 1])
            if len(between) <= MAX_CHARS_WITHIN_A_CLOCK and "\n" not in between:
                continue
        if at - start > 1:
            yield slots[start], slots[at - 1]
        start = at


def _slot_candidate(
    site: Site,
    family: Family,
    slots: list[int],
    kind: ValueKind,
    rows: list[Row],
    requests: list[Request],
) -> Candidate:
    template, slot = family.template, slots[0]
    first, second = _two_values(rows, slot)
    char = _offset_of_slot(family, first[2], slot)
    distinct = len({values[slot] for _, _, values in rows})
    title = TITLES[kind.kind]
    details: dict[str, Any] = {"distinct_values": distinct, "requests": len(rows), "kept_by_session": kind.per_session}
    if kind.period is not None:
        details["period"] = kind.period
        title += f", ticking every {kind.period}" if kind.period != "unknown" else ""
    mend = MENDS[kind.kind].format(where=site.description)
    if not site.is_operators:
        mend = "Put the fixed text of the prompt's template first and what varies behind it"
    return Candidate(
        kind=kind.kind,
        title=title,
        place=Place(f"{site.description}, character {char}", site.index, site.role, site.tool, char),
        examples=tuple(_example(template.literals, slot, values, requests[i].line) for i, _, values in (first, second)),
        mend=mend,
        rewrite=move_slots(site, family, slots, kind),
        pair=(first[0], second[0]),
        rule=_slot_rule(site, family, slot, kind),
        details=details,
        min_gain=0.003 if kind.kind != "varying_value" else 0.01,
    )


def _two_values(rows: list[Row], slot: int) -> tuple[Any, Any]:
    first = rows[0]
    return first, next(row for row in rows if row[2][slot] != first[2][slot])


def _offset_of_slot(family: Family, values: list[str], slot: int) -> int:
    return family.template.slot_start(slot) + sum(map(len, values[:slot]))


def _example(literals: tuple[str, ...], slot: int, values: list[str], line: int) -> Example:
    return Example(
        line,
        values[slot].strip().rstrip(".,;")[:200],
        literals[slot][-CONTEXT_CHARS:],
        literals[slot + 1][:CONTEXT_CHARS],
    )


def _slot_rule(site: Site, family: Family, slot: int, kind: ValueKind) -> dict[str, Any] | None:
    if not site.is_operators or kind.kind == "varying_value":
        return None
    return {
        "rule": "move_slot",
        "site": site.description,
        "after": family.template.literals[slot][-CONTEXT_CHARS:],
        "before": family.template.literals[slot + 1][:CONTEXT_CHARS],
        "to": "metadata"
        if kind.kind.startswith("request_")
        else "first user message"
        if kind.per_session
        else "last message",
    }


def move_slots(site: Site, family: Family, slots: list[int], kind: ValueKind) -> Rewrite:
    """Leaves a constant mark where the values were. A clock or an id goes out of the prompt; other values go behind the
    shared part: where a conversation keeps its value, to the end of its first user message; else to the end of what was
    sent when it changed. Of a plain prompt, and of text that is not the operator's, they go to the end."""
    marked = set(slots)
    dropped = kind.kind in {"clock", "request_id", "request_counter"}

    def moved(request: Request) -> tuple[Request, str | None]:
        """The request without its values, and the values; None where it has none."""
        text = site.text(request)
        values = None if text is None else family.template.values(text)
        if values is None:
            return request, None
        kept = family.template.fill(["…" if slot in marked else value for slot, value in enumerate(values)])
        value = " ".join(values[slot].strip() for slot in slots)
        if site.is_operators or site.role is None:
            return site.with_text(request, kept), value
        return site.with_text(request, f"{kept}\n{value}"), None

    def rewrite(requests: list[Request]) -> list[Request]:
        mended, values = zip(*map(moved, requests), strict=True)
        if dropped:
            return list(mended)
        if site.role is None:
            return [r if v is None else replace(r, text=f"{r.text}\n{v}") for r, v in zip(mended, values, strict=True)]
        if kind.per_session:
            return [r if v is None else _in_first_user(r, v) for r, v in zip(mended, values, strict=True)]
        return append_values(list(mended), list(values))

    return rewrite


def _in_first_user(request: Request, value: str) -> Request:
    messages: list[Message] = list(request.messages or ())
    at = next((i for i, message in enumerate(messages) if message.get("role") == "user"), len(messages) - 1)
    messages[at] = {**messages[at], "content": f"{text_of(messages[at])}\n{value}"}
    return replace(request, messages=messages)


def _versions_candidate(
    site: Site,
    family: Family,
    slots: list[int],
    rows: list[Row],
    requests: list[Request],
    counts: Counter[Version],
) -> Candidate:
    """Few texts, each used often: releases of a prompt, or the arms of a test. Mended by one text for all."""
    main, other = (version for version, _ in counts.most_common(2))
    first = next(row for row in rows if _version(row[2], slots) == main)
    second = next(row for row in rows if _version(row[2], slots) == other)
    slot = next(s for s in slots if first[2][s] != second[2][s])
    char = _offset_of_slot(family, first[2], slot)
    changes = sum(_version(a[2], slots) != _version(b[2], slots) for a, b in pairwise(rows))
    rollout = changes < 2 * len(counts)
    return Candidate(
        kind="system_prompt_versions",
        title=f"{len(counts)} versions of the {site.description} "
        + ("one after another" if rollout else "side by side (an A/B test?)"),
        place=Place(f"{site.description}, character {char}", site.index, site.role, site.tool, char),
        examples=tuple(
            _example(family.template.literals, slot, values, requests[i].line) for i, _, values in (first, second)
        ),
        mend=(
            "Put what differs between versions at the end of the text, keep a conversation on one version, and send "
            "each arm of a test to replicas of its own"
        ),
        rewrite=_one_version(site, family, dict(zip(slots, main, strict=True))),
        pair=(first[0], second[0]),
        details={"versions": len(counts), "changes": changes, "requests_by_version": list(counts.values())},
    )


def _one_version(site: Site, family: Family, main: dict[int, str]) -> Rewrite:
    def mend(request: Request) -> Request:
        text = site.text(request)
        values = None if text is None else family.template.values(text)
        if values is None:
            return request
        mended = family.template.fill([main.get(slot, value) for slot, value in enumerate(values)])
        return site.with_text(request, mended)

    return lambda requests: [mend(request) for request in requests]


def _first_difference(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
