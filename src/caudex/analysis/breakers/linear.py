"""History breakers of prompts that are one text, or one run of token ids: what was sent before comes back changed.

earlier prompt:  | opening |  old part  |  the rest  | opening of the answer
later prompt:    | opening | new | the rest          | answer | next turn | ...
                           ^ all from here on is computed anew, though most of it was sent before

Prompts are compared in small pieces that are cut where the text itself says, so that a prompt cut anywhere agrees with
the one before again from the next piece on.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

from caudex.analysis.align import (
    FIRST_TOKEN_CHARACTER,
    common_start,
    differences,
    is_unread,
    places_divisible,
    value_end,
    value_start,
    weight,
)
from caudex.analysis.breakers.candidate import Candidate, Example, Place, Rewrite
from caudex.analysis.breakers.edits import CLEARED_WORDS, strip_reasoning, text_change_kind
from caudex.analysis.breakers.history import HISTORY_MENDS, HISTORY_TITLES, MAX_THREADS
from caudex.analysis.sessions import SessionFinder
from caudex.trace.request import Request

MAX_PIECES = 6000
MAX_ANSWER_OPENING = 120
"""A prompt ends with the opening of the answer to be generated, which need not come back: this many characters."""

_TURN_WORDS = re.compile(r"\b(messages?|turns?|history|conversation|context|earlier|older|previous)\b", re.IGNORECASE)
_LIKE_ONE_ANOTHER = frozenset({"history_truncated", "history_summarized", "history_rewritten", "history_inserted"})
"""Kinds as which the changes of one defect may be seen, as text and as its place in the history have it."""

_VALUES = frozenset({"clock", "request_id"})

_TELLING_SHARE = 0.1
SHOWN_CHARS = 160
CONTEXT_CHARS = 48
MIN_GAIN = 0.005
_COMMON_SHARE = 0.5
_MIN_ANCHOR = 24
"""Equal text of fewer characters between two changes (a closing brace, a blank line) is part of the change."""

_MIN_TELLING = 12
_MAX_MARK = 40
_MANY = 3
_OPENINGS = 64
_LINE = re.compile(r"[^\n]*\n+|[^\n]+\Z")
_LONG_LINE = 400
_SENTENCE = re.compile(r".{40,}?(?:[.;,}\]] |\Z)|.+?\Z", re.DOTALL)
_TOKENS_A_PIECE = 8


def pieces_of(text: str) -> list[str]:
    """A text cut after its line ends, long lines at their sentences, token ids after every eighth on average; what is
    behind MAX_PIECES is one piece."""
    pieces: list[str] = []
    for line in _LINE.findall(text):
        if len(line) <= _LONG_LINE and line[0] < FIRST_TOKEN_CHARACTER:
            pieces.append(line)
        else:
            pieces += _cut_tokens(line) if line[0] >= FIRST_TOKEN_CHARACTER else _SENTENCE.findall(line)
    if len(pieces) > MAX_PIECES:
        pieces[MAX_PIECES:] = ["".join(pieces[MAX_PIECES:])]
    return pieces


def _cut_tokens(run: str) -> list[str]:
    cuts = [at + 1 for at in places_divisible(run, _TOKENS_A_PIECE)]
    return [run[a:b] for a, b in pairwise([0, *cuts, len(run)]) if a < b]


@dataclass(slots=True)
class _Change:
    """A request's departure from what its conversation sent before: `old`, at `char` of the request before, became
    `new`, which is at `new_char` of this one."""

    kind: str
    request: int
    previous: int
    char: int
    old: str
    new: str
    before: str
    new_char: int


@dataclass(slots=True)
class _Thread:
    """What a conversation's latest request sent, in pieces; `groups[i]` stands for `sent[i]` in the mended prompt, what
    was dropped before it included."""

    request: int
    sent: list[str]
    groups: list[str]


@dataclass(slots=True)
class _Rebuilt:
    requests: list[Request] = field(default_factory=list)
    changes: list[_Change] = field(default_factory=list)


class _Step(NamedTuple):
    """`sent[i1:i2]` became `pieces[j1:j2]`."""

    is_equal: bool
    i1: int
    i2: int
    j1: int
    j2: int


class _Openings:
    """How conversations open: what the first prompts of the log's first sessions have behind what they share.

    first prompts:  | shared head | ### User | ...
    a later one:    | shared head | ### Tool | ...    a mark that many conversations have, and none opens with
    """

    def __init__(self, prompts: list[list[str] | None], sessions: list[str]) -> None:
        firsts: dict[str, list[str]] = {}
        sessions_with: dict[str, set[str]] = defaultdict(set)
        for pieces, session in zip(prompts, sessions, strict=True):
            if pieces:
                firsts.setdefault(session, pieces)
                for mark in filter(_may_be_mark, () if is_unread(pieces[0]) else pieces):
                    sessions_with[mark].add(session)
        self._firsts = list(firsts.values())[:_OPENINGS]
        self._marks = {mark for mark, known in sessions_with.items() if len(known) >= _MANY}

    def head_of_cut(self, pieces: list[str], same: int) -> int | None:
        """How many pieces are the head of a prompt that begins in the middle and has `same` pieces in front as the one
        before had: one less where that one began with the same mark. None where it may begin a conversation."""
        return next((head for head in (same, same - 1) if head >= 0 and self._is_cut_behind(pieces, head)), None)

    def have_marks_in(self, pieces: list[str]) -> bool:
        """Whether turns begin among these pieces; of token ids that is not known, and may be."""
        return any(piece in self._marks or is_unread(piece) for piece in pieces)

    def _is_cut_behind(self, pieces: list[str], head: int) -> bool:
        """Whether a prompt goes on behind its first `head` pieces, which many share, as no conversation opens."""
        if head >= len(pieces) or pieces[head] not in self._marks:
            return False
        opened = [first[head : head + 1] for first in self._firsts if first[:head] == pieces[:head]]
        return len(opened) >= _MANY and [pieces[head]] not in opened


def _may_be_mark(piece: str) -> bool:
    return len(piece) <= _MAX_MARK


def find_linear_history_breakers(requests: list[Request], read: Callable[[str], str]) -> Iterator[Candidate]:
    """`read` turns a prompt's text into what a person would read (token ids decoded)."""
    if sum(request.text is not None for request in requests) < 2:
        return
    changes: dict[str, list[_Change]] = defaultdict(list)
    for change in _rebuild(requests, frozenset(), read).changes:
        changes[change.kind].append(change)
    unread = any(is_unread(read(change.old or change.new)) for found in changes.values() for change in found)
    together = [kind for kind in changes if unread or kind in _LIKE_ONE_ANOTHER]
    if len(together) > 1:
        main = _main_kind({kind: changes[kind] for kind in together})
        all_changes = [*changes[main], *(c for kind in together if kind != main for c in changes[kind])]
        yield _candidate(main, frozenset(together), all_changes, requests, read)
    for kind, found in changes.items():
        yield _candidate(kind, frozenset({kind}), found, requests, read)


def _main_kind(changes: dict[str, list[_Change]]) -> str:
    """What to call changes of several kinds: a summary takes the place of turns and is written anew, and so is seen as
    other kinds too; else the kind by which most is lost."""
    if len(changes.get("history_summarized", ())) >= _TELLING_SHARE * sum(map(len, changes.values())):
        return "history_summarized"
    return max(changes, key=lambda kind: sum(len(change.old) for change in changes[kind]))


def _candidate(
    kind: str, kinds: frozenset[str], changes: list[_Change], requests: list[Request], read: Callable[[str], str]
) -> Candidate:
    """`changes` are of all `kinds`, those of the `kind` that is told first."""
    change = max((c for c in changes if c.kind == kind), key=lambda change: len(change.old))
    place = f"prompt, character {change.char}"
    if kind in _VALUES and not is_unread(change.old or change.new):
        rewrite = _without_values(kinds, read)
    elif kind == "reasoning_stripped" and all(read(change.old) == change.old for change in changes):
        rewrite = _without_reasoning(change)
    else:
        rewrite = _undone(kinds, read)
    return Candidate(
        kind=kind,
        title=HISTORY_TITLES.get(kind, HISTORY_TITLES["history_rewritten"]),
        place=Place(place, char=change.char),
        examples=(
            Example(requests[change.previous].line, change.old[:SHOWN_CHARS], change.before),
            Example(requests[change.request].line, change.new[:SHOWN_CHARS] or "dropped", change.before),
        ),
        mend=HISTORY_MENDS.get(kind, HISTORY_MENDS["history_rewritten"]).format(where="history"),
        rewrite=rewrite,
        pair=(change.previous, change.request),
        details={"changes": len(changes), "sessions": len({requests[c.request].session for c in changes})},
        min_gain=MIN_GAIN,
    )


def _without_reasoning(change: _Change) -> Rewrite:
    """Strips reasoning from every prompt, with as many blanks behind it as this change took away."""
    rest = strip_reasoning(change.old, 0)
    blanks = len(rest) - len(change.new) if rest.endswith(change.new) else None
    return lambda log: [r if r.text is None else replace(r, text=strip_reasoning(r.text, blanks)) for r in log]


def _undone(kinds: frozenset[str], read: Callable[[str], str]) -> Rewrite:
    return lambda log: _rebuild(log, kinds, read).requests


def _without_values(kinds: frozenset[str], read: Callable[[str], str]) -> Rewrite:
    return lambda log: _rebuild(_cut_values(log, kinds, read), kinds, read).requests


def _cut_values(requests: list[Request], kinds: frozenset[str], read: Callable[[str], str]) -> list[Request]:
    """The log without what changes of these kinds put in the place of one another, on either side: were the first of
    each conversation kept, conversations would still part there."""
    values: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for change in _rebuild(requests, frozenset(), read).changes:
        for span in differences(change.old, change.new) if change.kind in kinds else ():
            values[change.previous].append((change.char + span.a_start, change.char + span.a_end))
            values[change.request].append((change.new_char + span.b_start, change.new_char + span.b_end))
    return [
        replace(request, text=_cut_out(request.text or "", values[number])) if number in values else request
        for number, request in enumerate(requests)
    ]


def _cut_out(text: str, values: list[tuple[int, int]]) -> str:
    """The text without these stretches and the rest of the words that they are in."""
    parts = []
    position = 0
    for start, end in sorted(values):
        if start < end:
            start, end = value_start(text, start), value_end(text, end)
        parts.append(text[position : max(start, position)])
        position = max(position, end)
    return "".join([*parts, text[position:]])


def _rebuild(requests: list[Request], mended: frozenset[str], read: Callable[[str], str]) -> _Rebuilt:
    """Follows every conversation and undoes the changes of the kinds in `mended`, so that its prompts only grow."""
    prompts = [None if request.text is None else pieces_of(request.text) for request in requests]
    sessions = _sessions(requests, prompts)
    openings = _Openings(prompts, sessions)
    threads: dict[str, list[_Thread]] = defaultdict(list)
    rebuilt = _Rebuilt()
    for index, (request, pieces, session) in enumerate(zip(requests, prompts, sessions, strict=True)):
        if not pieces:
            rebuilt.requests.append(request)
            continue
        known = threads[session]
        thread = _best_thread(known, pieces)
        groups = pieces
        if thread is not None:
            groups, changes = _follow(thread, pieces, index, mended, read, openings)
            rebuilt.changes += changes
            known.remove(thread)
        known.append(_Thread(index, pieces, groups))
        del known[:-MAX_THREADS]
        text = "".join(groups)
        rebuilt.requests.append(request if text == request.text else replace(request, text=text))
    return rebuilt


def _sessions(requests: list[Request], prompts: list[list[str] | None]) -> list[str]:
    """The session of each prompt: as logged, or found by what it shares with earlier ones. Pieces that most prompts
    have are the template's, and tell nothing."""
    uses = Counter(piece for pieces in prompts if pieces for piece in set(pieces))
    common = {piece for piece, count in uses.items() if count > max(_COMMON_SHARE * len(prompts), 1)}
    finder = SessionFinder()
    sessions = []
    for request, pieces in zip(requests, prompts, strict=True):
        if request.session is not None:
            sessions.append(request.session)
        else:
            telling = [piece for piece in pieces or () if piece not in common and weight(piece) >= _MIN_TELLING]
            sessions.append(finder.session_of(telling))
    return sessions


def _best_thread(threads: list[_Thread], pieces: list[str]) -> _Thread | None:
    """The thread that shares most text with these; the latest of equals; None where none shares any."""
    own = set(pieces)
    best, most = None, 0
    for thread in threads:
        shared = sum(len(piece) for piece in thread.sent if piece in own)
        if shared and shared >= most:
            best, most = thread, shared
    return best


def _follow(
    thread: _Thread,
    pieces: list[str],
    index: int,
    mended: frozenset[str],
    read: Callable[[str], str],
    openings: _Openings,
) -> tuple[list[str], list[_Change]]:
    """The groups of a request's mended prompt, and the changes that it made to its thread."""
    sent = thread.sent
    same = common_start(sent, pieces)
    if sum(map(weight, sent[same:])) <= MAX_ANSWER_OPENING or _is_written_on(sent[same:], pieces[same:]):
        return [*thread.groups[:same], *pieces[same:]], []
    steps = _steps(sent, pieces, same)
    last_known = max((number for number, step in enumerate(steps) if step.is_equal), default=-1)
    head = openings.head_of_cut(pieces, same) if last_known <= 0 else None
    if head is not None:
        return _all_dropped(thread, pieces, index, mended, head)
    groups: list[str] = []
    changes: list[_Change] = []
    dropped = ""
    for step in steps[: last_known + 1]:
        if step.is_equal:
            kept = thread.groups[step.i1 : step.i2]
            groups += [dropped + kept[0], *kept[1:]]
            dropped = ""
            continue
        change = _change(step, sent, pieces, index, thread.request, read)
        if _says_cleared(change.new) and not openings.have_marks_in(sent[step.i1 : step.i2]):
            change.kind = "tool_results_cleared"
        changes.append(change)
        if change.kind in mended:
            dropped += "".join(thread.groups[step.i1 : step.i2])
            groups += [""] * (step.j2 - step.j1)
        else:
            groups += pieces[step.j1 : step.j2]
    return [*groups, *pieces[len(groups) :]], changes


def _all_dropped(
    thread: _Thread, pieces: list[str], index: int, mended: frozenset[str], head: int
) -> tuple[list[str], list[_Change]]:
    """A prompt that kept nothing but the head of what was sent, and the newest turn."""
    lead, old = "".join(thread.sent[:head]), "".join(thread.sent[head:])
    change = _Change("history_truncated", index, thread.request, len(lead), old, "", lead[-CONTEXT_CHARS:], len(lead))
    if change.kind not in mended:
        return pieces, [change]
    return [*thread.groups[:head], "".join(thread.groups[head:]) + pieces[head], *pieces[head + 1 :]], [change]


def _is_written_on(rest: list[str], following: list[str]) -> bool:
    """Whether the last piece sent was simply continued."""
    return len(rest) == 1 and bool(following) and following[0].startswith(rest[0])


def _says_cleared(mark: str) -> bool:
    """Whether a mark says that something is gone, and not that turns are."""
    return CLEARED_WORDS.search(mark) is not None and _TURN_WORDS.search(mark) is None


def _change(
    step: _Step, sent: list[str], pieces: list[str], index: int, previous: int, read: Callable[[str], str]
) -> _Change:
    old, new = "".join(sent[step.i1 : step.i2]), "".join(pieces[step.j1 : step.j2])
    kind = text_change_kind(read(old), read(new))
    begin = common_start(old, new) if kind != "history_truncated" else 0
    lead = "".join(sent[: step.i1])
    before = (lead + old[:begin])[-CONTEXT_CHARS:]
    new_char = sum(map(len, pieces[: step.j1])) + begin
    return _Change(kind, index, previous, len(lead) + begin, old[begin:], new[begin:], before, new_char)


def _steps(sent: list[str], pieces: list[str], same: int) -> list[_Step]:
    """How one list of pieces became the other, given how many they begin with alike. Slight agreements between changes
    are taken for chance."""
    matcher = SequenceMatcher(None, sent[same:], pieces[same:], autojunk=False)
    steps = [_Step(True, 0, same, 0, same)] if same else []
    for tag, *ends in matcher.get_opcodes():
        step = _Step(tag == "equal", *(end + same for end in ends))
        if step.is_equal and steps and sum(map(weight, sent[step.i1 : step.i2])) < _MIN_ANCHOR:
            step = step._replace(is_equal=False)
        if steps and steps[-1].is_equal == step.is_equal:
            step = _Step(step.is_equal, steps[-1].i1, step.i2, steps.pop().j1, step.j2)
        steps.append(step)
    return steps
