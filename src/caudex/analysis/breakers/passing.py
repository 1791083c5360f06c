"""Messages that stand near a prompt's end and are gone from there in the next: reminders, notes, the state of a task.

earlier request:  | history | reminder | newest turn |
later request:    | history | newest turn | answer | reminder | next turn |
                            ^ computed anew, though the history goes on as it was
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from caudex.analysis.breakers.candidate import Candidate, Example, Place
from caudex.analysis.corpus import by_session, common_messages, head_lengths, text_of
from caudex.trace.request import Message, Request

MAX_TOGETHER = 3
_OPERATORS = "system"
_ROLES = frozenset({_OPERATORS, "user"})
_SHOWN_CHARS = 160


@dataclass(frozen=True, slots=True)
class _Passage:
    """Messages `first` to `last` (exclusive) of a request, which the conversation's `following` request has not."""

    request: int
    following: int
    first: int
    last: int


def find_passing_messages(requests: list[Request]) -> Candidate | None:
    passages = list(_passages(requests))
    if not passages:
        return None
    shown = passages[0]
    message = _message(requests[shown.request], shown.first)
    instead = _message(requests[shown.following], shown.first)
    role = str(message.get("role"))
    return Candidate(
        kind="history_inserted",
        title="Messages come and go inside the history",
        place=Place(f"message {shown.first} ({role}), character 0", shown.first, role, None, 0),
        examples=(
            Example(requests[shown.request].line, text_of(message)[:_SHOWN_CHARS]),
            Example(requests[shown.following].line, f"gone: {text_of(instead)[:_SHOWN_CHARS]}"),
        ),
        mend="Put reminders that never change into the system message; append others at the end and leave them there",
        rewrite=without_passing_messages,
        pair=(shown.request, shown.following),
        details={"changes": len(passages), "sessions": len({requests[p.request].session for p in passages})},
    )


def without_passing_messages(requests: list[Request]) -> list[Request]:
    """The log without messages that come and go, those of each conversation's last request included where they are the
    same."""
    passages = list(_passages(requests))
    uses = Counter(id(_message(requests[p.request], at)) for p in passages for at in range(p.first, p.last))
    places = {(p.request, at) for p in passages for at in range(p.first, p.last)}

    def left(number: int, request: Request) -> Request:
        kept = [
            message
            for at, message in enumerate(request.messages or ())
            if (number, at) not in places and uses[id(message)] < 2
        ]
        return request if len(kept) == len(request.messages or ()) else replace(request, messages=kept)

    return [left(number, request) for number, request in enumerate(requests)]


def _message(request: Request, at: int) -> Message:
    messages = request.messages or []
    return messages[at] if at < len(messages) else {}


def _passages(requests: list[Request]) -> Iterator[_Passage]:
    heads = head_lengths(requests)
    for session in by_session(requests).values():
        indices = [index for index in session if requests[index].messages]
        new_from = 0
        for before, after in pairwise(indices):
            sent, now = requests[before].messages or [], requests[after].messages or []
            same = common_messages(sent, now)
            count = _num_passing(sent, now, same, heads[before], new_from)
            if count:
                yield _Passage(before, after, same, same + count)
            new_from = same if same < len(sent) else len(sent)


def _num_passing(sent: list[Message], now: list[Message], same: int, head: int, new_from: int) -> int:
    """How many of `sent` behind the first `same` are gone in `now`, which goes on with the rest of `sent`; 0 where
    something else happened. What was there before the latest request, from `new_from` on, is history that is cut."""
    if same < max(head, new_from):
        return 0
    for count in range(1, min(MAX_TOGETHER, len(sent) - same) + 1):
        gone, rest = sent[same : same + count], sent[same + count :]
        if any(message.get("role") not in _ROLES for message in gone):
            return 0
        follows = len(rest) == common_messages(rest, now[same:])
        operators = all(message.get("role") == _OPERATORS for message in gone)
        again = any(message is later for message in gone for later in now[same:])
        if follows and (operators or again or (rest and same > head)):
            return count
    return 0
