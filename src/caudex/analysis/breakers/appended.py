"""Values that change within a conversation, told where they changed and left there, so that prompts only grow.

as logged:  | text with v1 | turn 1 |          | text with v2 | turn 1 | turn 2 |
mended:     | text         | turn 1, v1 |      | text         | turn 1, v1 | turn 2, v2 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caudex.analysis.align import common_start
from caudex.analysis.corpus import text_of
from caudex.trace.request import Message, Request


@dataclass(frozen=True, slots=True)
class _Told:
    """What a conversation was told so far: its latest messages without the values, the latest value, and each note with
    how many messages are before it."""

    messages: list[Message]
    value: str
    notes: tuple[tuple[int, str], ...]


def append_values(requests: list[Request], values: list[str | None]) -> list[Request]:
    """The requests, each with its value at its end and with those of its conversation's earlier requests where those
    had them; of a value that only grows, what is new. None leaves a request as it is."""
    told: dict[str, _Told] = {}
    appended = []
    for request, value in zip(requests, values, strict=True):
        if value is None or not request.messages:
            appended.append(request)
            continue
        now = _told(told.get(request.session or ""), request.messages, value)
        if request.session is not None:
            told[request.session] = now
        appended.append(_with_notes(request, now.notes))
    return appended


def _told(before: _Told | None, messages: list[Message], value: str) -> _Told:
    if before is None or messages[: len(before.messages)] != before.messages:
        return _Told(messages, value, ((len(messages), value),))
    new = value[common_start(before.value, value) :] if value.startswith(before.value) else value
    return _Told(messages, value, (*before.notes, (len(messages), new)) if new else before.notes)


def _with_notes(request: Request, notes: Sequence[tuple[int, str]]) -> Request:
    messages: list[Message] = list(request.messages or ())
    for end, note in notes:
        messages[end - 1] = {**messages[end - 1], "content": f"{text_of(messages[end - 1])}\n{note}"}
    return replace(request, messages=messages)
