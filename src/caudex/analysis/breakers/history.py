"""Conversations that do not grow at their end: turns dropped, summarised or written over after they were sent.

A thread is a conversation whose requests each repeat what the one before had and add to it. Where a request repeats it
with a change, and what follows the change is the same again, everything after the change is computed anew for nothing.
(A request that goes another way from some turn on and never comes back is a branch, and no breaker.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from operator import is_
from typing import NamedTuple

from caudex.analysis.align import (
    common_end,
    common_start,
    differences,
    similarity,
    value_start,
)
from caudex.analysis.breakers.candidate import Candidate, Example, Place, Rewrite
from caudex.analysis.breakers.edits import (
    edit_kind,
    gap_kind,
    has_reasoning,
    is_cut_short,
    strip_reasoning,
    tells_what_was_said,
    whole_text,
)
from caudex.analysis.breakers.passing import find_passing_messages, without_passing_messages
from caudex.analysis.breakers.slots import MENDS, TITLES
from caudex.analysis.corpus import head_lengths, text_of
from caudex.trace.request import Message, Request

MAX_THREADS = 8
HISTORY_TITLES = {
    "history_truncated": "The oldest turns are dropped from the history",
    "history_summarized": "Old turns are replaced by a summary",
    "history_rewritten": "Turns are rewritten after they were sent",
    "history_inserted": "Messages come and go inside the history",
    "reasoning_stripped": "Reasoning is stripped from earlier turns",
    "output_rewritten": "Model output is written back differently",
    "tool_results_cleared": "Old tool results are shortened or cleared",
    **TITLES,
}
HISTORY_MENDS = {
    "history_truncated": "Keep the history, or drop turns rarely and many at once: a drop costs one whole prompt",
    "history_summarized": "Summarise rarely and in large steps, or append the summary",
    "history_rewritten": "Send earlier turns back exactly as first sent; correct by appending, not by editing",
    "history_inserted": "Append reminders and context at the end, and leave them where they were put",
    "reasoning_stripped": "Leave reasoning out of every turn that is sent back, or keep it in all of them",
    "output_rewritten": "Send the model's output back byte for byte: do not parse and re-serialise it, do not trim it",
    "tool_results_cleared": "Clear old tool results rarely and many at a time, or keep them",
    "whitespace_drift": "Send earlier turns back with the same blanks and line ends as the first time",
    **MENDS,
}
_Key = int


@dataclass(slots=True)
class _Change:
    """One request's departure from the thread so far: messages `old` of the request before became `new`."""

    kind: str
    request: int
    previous: int
    at: int
    old: list[Message]
    new: list[Message]


@dataclass(slots=True)
class _Thread:
    """What a conversation's latest request sent, and what an append-only client would have sent in its place.

    `groups[i]` are the messages that stand for `sent[i]` in the mended history, turns that were dropped before it
    included; `mended_opening` stands for the operator's messages in front, `opening`.
    """

    request: int
    sent: list[Message]
    groups: list[list[Message]]
    opening: list[Message]
    mended_opening: list[Message]


@dataclass(slots=True)
class _Rebuilt:
    requests: list[Request] = field(default_factory=list)
    changes: list[_Change] = field(default_factory=list)


def find_history_breakers(requests: list[Request]) -> Iterator[Candidate]:
    if not any(request.messages for request in requests):
        return
    passing = find_passing_messages(requests)
    if passing is not None:
        yield passing
        requests = without_passing_messages(requests)
    changes: dict[str, list[_Change]] = defaultdict(list)
    for change in rebuild(requests, frozenset()).changes:
        changes[change.kind].append(change)
    for kind, found in changes.items():
        yield _candidate(kind, found, requests)


def _candidate(kind: str, changes: list[_Change], requests: list[Request]) -> Candidate:
    change = changes[0]
    old, new = _shown(change)
    role = str((change.old or change.new)[0].get("role"))
    where = f"message {change.at} ({role})"
    return Candidate(
        kind=kind,
        title=HISTORY_TITLES.get(kind, "Turns are rewritten after they were sent"),
        place=Place(f"{where}, character {old[0]}", change.at, role, None, old[0]),
        examples=(
            Example(requests[change.previous].line, old[1], old[2]),
            Example(requests[change.request].line, new[1], new[2]),
        ),
        mend=HISTORY_MENDS.get(kind, HISTORY_MENDS["history_rewritten"]).format(where=f"history ({where})"),
        rewrite=_rewrite(kind),
        pair=(change.previous, change.request),
        details={"changes": len(changes), "sessions": len({requests[c.request].session for c in changes})},
    )


def _rewrite(kind: str) -> Rewrite:
    if kind == "reasoning_stripped":
        return lambda log: [_strip_reasoning(request) for request in log]
    return lambda log: rebuild(log, frozenset({kind})).requests


def _shown(change: _Change) -> tuple[tuple[int, str, str], tuple[int, str, str]]:
    """(character, value, text before) on either side of a change."""
    a = whole_text(change.old[0]) if change.old else ""
    b = whole_text(change.new[0]) if change.new else ""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    at = value_start(a, at)
    if not change.new and change.old:
        return (0, a[:160], f"{len(change.old)} messages, from: "), (0, "", "dropped")
    if len(change.old) != len(change.new):
        at = 0
    return (at, a[at : at + 160], a[max(0, at - 48) : at]), (at, b[at : at + 160], b[max(0, at - 48) : at])


def rebuild(requests: list[Request], mended_kinds: frozenset[str]) -> _Rebuilt:
    """Follows every conversation, notes where it departs from what it sent before, and undoes the departures of
    `mended_kinds`, so that those histories only ever grow."""
    threads: dict[str, list[_Thread]] = defaultdict(list)
    rebuilt = _Rebuilt()
    for index, (request, head) in enumerate(zip(requests, head_lengths(requests), strict=True)):
        if not request.messages or request.session is None:
            rebuilt.requests.append(request)
            continue
        opening, turns = request.messages[:head], request.messages[head:]
        known = threads[request.session]
        thread = _best_thread(known, turns)
        if thread is None and not (known and _begins_in_the_middle(turns)):
            known.append(_Thread(index, turns, [[turn] for turn in turns], opening, opening))
            del known[:-MAX_THREADS]
            rebuilt.requests.append(request)
            continue
        earlier = thread or known[-1]
        cleared = _without_summary(opening, earlier)
        mends = mended_kinds if cleared is None else _for_what_is_dropped(mended_kinds)
        if thread is None:
            groups, changes = _all_dropped(earlier, turns, index, head, mends)
        else:
            groups, changes = _follow(earlier, turns, index, head, mends)
        kept = earlier.mended_opening if opening == earlier.opening else opening
        if cleared is not None:
            changes = [_told_in(opening, cleared, change) for change in changes]
            kept = cleared if "history_summarized" in mended_kinds else opening
        rebuilt.changes.extend(changes)
        known.remove(earlier)
        known.append(_Thread(index, turns, groups, opening, kept))
        mended = [*kept, *(turn for group in groups for turn in group)]
        same = len(mended) == len(request.messages) and all(map(is_, mended, request.messages))
        rebuilt.requests.append(request if same else replace(request, messages=mended))
    return rebuilt


def _all_dropped(
    thread: _Thread, turns: list[Message], index: int, head: int, mended: frozenset[str]
) -> tuple[list[list[Message]], list[_Change]]:
    """A request that kept nothing of its thread, and begins in the middle of a conversation."""
    dropped = [turn for group in thread.groups for turn in group] if "history_truncated" in mended else []
    change = _Change("history_truncated", index, thread.request, head, thread.sent, [])
    return [[*dropped, turns[0]], *([turn] for turn in turns[1:])], [change]


def _without_summary(opening: list[Message], thread: _Thread) -> list[Message] | None:
    """The operator's messages without a summary of what was said that they did not have at first; None where they have
    none. What else varies in them (a clock) stays."""
    if opening == thread.opening or len(opening) != len(thread.mended_opening):
        return None
    cleared = [_cleared_of_summary(now, first) for now, first in zip(opening, thread.mended_opening, strict=True)]
    return None if cleared == opening else cleared


def _cleared_of_summary(message: Message, first: Message) -> Message:
    now, before = text_of(message), text_of(first)
    start = common_start(before, now)
    if now == before or not tells_what_was_said(now[start : len(now) - common_end(before[start:], now[start:])]):
        return message
    text = ""
    end = 0
    for span in differences(before, now):
        added = now[span.b_start : span.b_end]
        text += now[end : span.b_start] + (before[span.a_start : span.a_end] if tells_what_was_said(added) else added)
        end = span.b_end
    return {**message, "content": text + now[end:]}


def _for_what_is_dropped(mended: frozenset[str]) -> frozenset[str]:
    """The kinds to mend where turns that are dropped are told in a summary elsewhere."""
    dropped = {"history_truncated"}
    return mended | dropped if "history_summarized" in mended else mended - dropped


def _told_in(opening: list[Message], cleared: list[Message], change: _Change) -> _Change:
    """Turns that were dropped, as the summary that stands for them in an operator's message."""
    if change.kind != "history_truncated":
        return change
    at = next(n for n, (old, new) in enumerate(zip(cleared, opening, strict=True)) if old != new)
    return replace(change, kind="history_summarized", at=at, old=[cleared[at]], new=[opening[at]])


def _best_thread(threads: list[_Thread], turns: list[Message]) -> _Thread | None:
    """The thread that shares most turns with these; the latest of equals; None where none shares any."""
    keys = {_key(turn) for turn in turns}
    best, most = None, 0
    for thread in threads:
        shared = sum(_key(turn) in keys for turn in thread.sent)
        if shared and shared >= most:
            best, most = thread, shared
    return best if best or _begins_in_the_middle(turns) else _similar_thread(threads, turns)


def _similar_thread(threads: list[_Thread], turns: list[Message]) -> _Thread | None:
    """A thread whose only turn so far was sent again with a small change."""
    for thread in reversed(threads):
        if thread.sent and turns and _alike(thread.sent[0], turns[0]):
            return thread
    return None


def _begins_in_the_middle(turns: list[Message]) -> bool:
    """Whether a conversation opens with what only answers something: all before it was dropped."""
    return bool(turns) and turns[0].get("role") in {"assistant", "tool"}


def _key(message: Message) -> _Key:
    return id(message)


class _Step(NamedTuple):
    """`sent[i1:i2]` stands where `turns[j1:j2]` does: as difflib says it, and "edit" for turns that are alike."""

    tag: str
    i1: int
    i2: int
    j1: int
    j2: int


def _follow(
    thread: _Thread, turns: list[Message], index: int, head: int, mended: frozenset[str]
) -> tuple[list[list[Message]], list[_Change]]:
    """Aligns a request with its thread; gives the groups of its mended history, and the changes it made.

    sent:   | equal | replaced or dropped | equal |
    turns:  | equal | what stands there   | equal | new turns
                                           ^ what comes after a change must be the same again for it to count
    """
    sent = thread.sent
    if len(turns) >= len(sent) and all(a is b for a, b in zip(sent, turns, strict=False)):
        return [*thread.groups, *([turn] for turn in turns[len(sent) :])], []
    steps = _steps(sent, turns)
    last_known = max((number for number, step in enumerate(steps) if step.tag in {"equal", "edit"}), default=-1)
    groups: list[list[Message]] = []
    changes: list[_Change] = []
    dropped: list[Message] = []
    for step in steps[: last_known + 1]:
        if step.tag == "equal":
            kept = thread.groups[step.i1 : step.i2]
            groups += [[*dropped, *kept[0]], *kept[1:]] if dropped else kept
            dropped = []
            continue
        made = _changes(step, sent, turns, index, thread.request, head)
        changes += made
        if len(made) == step.i2 - step.i1 == step.j2 - step.j1:
            pairs = zip(made, thread.groups[step.i1 : step.i2], strict=True)
            groups += [group if change.kind in mended else change.new for change, group in pairs]
        elif made[0].kind in mended:
            dropped += [turn for group in thread.groups[step.i1 : step.i2] for turn in group]
            groups += [[] for _ in range(step.j1, step.j2)]
        else:
            groups += [[turn] for turn in turns[step.j1 : step.j2]]
    return [*groups, *([turn] for turn in turns[len(groups) :])], changes


def _changes(
    step: _Step, sent: list[Message], turns: list[Message], index: int, previous: int, head: int
) -> list[_Change]:
    """One change a message where messages were edited one for one, else one for the whole step."""
    old, new = sent[step.i1 : step.i2], turns[step.j1 : step.j2]
    if step.tag == "replace" and len(new) < len(old) and is_cut_short(*map(_joined, (old, new)), inside=False):
        return [_Change("history_truncated", index, previous, head + step.i1, old, new)]
    if step.tag in {"replace", "edit"} and len(old) == len(new):
        return [
            _Change(edit_kind(a, b), index, previous, head + step.i1 + number, [a], [b])
            for number, (a, b) in enumerate(zip(old, new, strict=True))
        ]
    return [_Change(gap_kind(old, new), index, previous, head + step.i1, old, new)]


def _joined(messages: list[Message]) -> str:
    return "".join(map(whole_text, messages))


def _steps(sent: list[Message], turns: list[Message]) -> list[_Step]:
    """How the turns sent before became these. The last turn sent may come back edited, with new turns after it."""
    matcher = SequenceMatcher(None, [_key(t) for t in sent], [_key(t) for t in turns], autojunk=False)
    steps = [_Step(*opcode) for opcode in matcher.get_opcodes()]
    if not steps or steps[-1].tag != "replace":
        return steps
    _, i1, i2, j1, j2 = steps[-1]
    pairs = 0
    while i1 + pairs < i2 and j1 + pairs < j2 and _alike(sent[i1 + pairs], turns[j1 + pairs]):
        pairs += 1
    if i1 + pairs < i2 or _has_grown(sent[i2 - 1], turns[j1 + pairs - 1]):
        return steps
    return [*steps[:-1], _Step("edit", i1, i2, j1, j1 + pairs), _Step("insert", i2, i2, j1 + pairs, j2)]


def _has_grown(old: Message, new: Message) -> bool:
    """Whether a turn was continued where it ended, which costs nothing: all that was sent is still a prefix."""
    return old.get("role") == new.get("role") and whole_text(new).startswith(whole_text(old))


def _alike(a: Message, b: Message) -> bool:
    if a.get("role") != b.get("role"):
        return False
    text_a, text_b = whole_text(a), whole_text(b)
    shorter, longer = sorted((text_a, text_b), key=len)
    if len(shorter) >= 16 and shorter in longer:
        return True
    return len(shorter) >= 0.5 * len(longer) and similarity(text_a, text_b, differences(text_a, text_b)) >= 0.6


def _strip_reasoning(request: Request) -> Request:
    if not any(has_reasoning(message) for message in request.messages or ()):
        return request
    stripped = []
    for message in request.messages or ():
        if has_reasoning(message):
            message = {**message, "content": strip_reasoning(text_of(message))}
            message.pop("reasoning_content", None)
        stripped.append(message)
    return replace(request, messages=stripped)
