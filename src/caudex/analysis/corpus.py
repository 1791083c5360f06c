"""The requests of a log as structure: messages and tools, each distinct one kept once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from caudex.analysis.sessions import SessionFinder
from caudex.trace.request import Message, Request, Tool

DEFAULT_MAX_BYTES = 64 << 20
_MIN_TELLING_CHARS = 12
TOKEN_BYTES = 4


class Corpus:
    """Requests whose equal messages and tool lists are one object, so `is` compares them and memory is bounded by
    distinct content. Past `max_bytes` of distinct content no more requests are taken, and `complete` is False.

    A request without a session is given one by what it shares with earlier requests (see `SessionFinder`).
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.requests: list[Request] = []
        self.complete = True
        self.sessions_inferred = False
        self.max_bytes = max_bytes
        self._used_bytes = 0
        self._known: dict[bytes, Any] = {}
        self._finder = SessionFinder()

    def add(self, request: Request) -> None:
        if not self.complete:
            return
        if self._used_bytes > self.max_bytes:
            self.complete = False
            return
        if request.messages is not None:
            request.messages = [self._interned(message) for message in request.messages]
        if request.tools is not None:
            request.tools = self._interned([self._interned(tool) for tool in request.tools])
        if request.messages is None:
            self._used_bytes += len(request.text or "") + TOKEN_BYTES * len(request.token_ids or ())
        if request.session is None and request.messages is not None:
            request.session = self._finder.session_of([id(turn) for turn in request.messages if _is_telling(turn)])
            self.sessions_inferred = True
        self.requests.append(request)

    def _interned(self, value: Any) -> Any:
        key = msgspec.json.encode(value)
        known = self._known.get(key)
        if known is None:
            self._known[key] = known = value
            self._used_bytes += 3 * len(key)
        return known


def _is_telling(message: Message) -> bool:
    """Whether a message tells one conversation from another: no system prompt, and no short turn ("yes")."""
    if message.get("role") == "system":
        return False
    return bool(message.get("tool_calls")) or len(text_of(message)) >= _MIN_TELLING_CHARS


def head_length(messages: list[Message]) -> int:
    """How many messages at the front are the operator's (system, developer), not the conversation."""
    count = 0
    while count < len(messages) and messages[count].get("role") == "system":
        count += 1
    return count


def head_lengths(requests: list[Request]) -> list[int]:
    """`head_length` of each request, less what its conversation did not have in front from the first: a system message
    that comes later (a summary, a reminder) is part of the history."""
    least: dict[str, int] = {}
    lengths = [head_length(request.messages or []) for request in requests]
    for request, length in zip(requests, lengths, strict=True):
        if request.session is not None and request.messages:
            least[request.session] = min(length, least.get(request.session, length))
    return [least.get(request.session or "", length) for request, length in zip(requests, lengths, strict=True)]


def common_messages(a: list[Message], b: list[Message]) -> int:
    """How many messages the two begin with alike; equal ones are one object."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x is not y), min(len(a), len(b)))


def by_session(requests: list[Request]) -> dict[str, list[int]]:
    """Indices of the requests of each session, in order; a request without a session is a session of its own."""
    sessions: dict[str, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        sessions[request.session if request.session is not None else f"\0{index}"].append(index)
    return sessions


def text_of(message: Message) -> str:
    return message.get("content") or ""


def tool_name(tool: Tool) -> str:
    return str(tool.get("function", tool).get("name", ""))
