"""The requests of a log as structure: messages and tools, each distinct one kept once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Set
from typing import Any

import msgspec

from caudex.trace.request import Message, Request, Tool

DEFAULT_MAX_BYTES = 256 << 20
_MIN_TELLING_CHARS = 12


class Corpus:
    """Requests whose equal messages and tool lists are one object, so `is` compares them and memory is bounded by
    distinct content. Past `max_bytes` of distinct content no more requests are taken, and `complete` is False.

    A request without a session is given one by what it shares with earlier requests (see `_SessionFinder`), but for
    messages whose text is in `common`.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES, common: Set[str] = frozenset()) -> None:
        self.requests: list[Request] = []
        self.complete = True
        self.sessions_inferred = False
        self.max_bytes = max_bytes
        self._used_bytes = 0
        self._known: dict[bytes, Any] = {}
        self._finder = _SessionFinder(common)

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
            self._used_bytes += len(request.text or "") + 8 * len(request.token_ids or ())
        if request.session is None and request.messages is not None:
            request.session = self._finder.session_of(request)
            self.sessions_inferred = True
        self.requests.append(request)

    def _interned(self, value: Any) -> Any:
        key = msgspec.json.encode(value)
        known = self._known.get(key)
        if known is None:
            self._known[key] = known = value
            self._used_bytes += 3 * len(key)
        return known


class _SessionFinder:
    """Which conversation a request without a session id goes on with: the one that its opening turn is from, or (where
    the opening was dropped) the one that most of its turns are from.

    System prompts, short turns ("yes") and texts in `common` tell nothing and are passed over.
    """

    def __init__(self, common: Set[str]) -> None:
        self._common = common
        self._session_of_turn: dict[int, str] = {}
        self._count = 0

    def session_of(self, request: Request) -> str:
        turns = [id(message) for message in request.messages or () if self._is_telling(message)]
        known = Counter(self._session_of_turn[turn] for turn in turns if turn in self._session_of_turn)
        session = self._session_of_turn.get(turns[0]) if turns else None
        if session is None and known:
            likeliest, count = known.most_common(1)[0]
            session = likeliest if count >= 2 and 2 * count >= len(turns) else None
        if session is None:
            session = f"conversation {self._count}"
            self._count += 1
        for turn in turns:
            self._session_of_turn[turn] = session
        return session

    def _is_telling(self, message: Message) -> bool:
        if message.get("role") == "system" or text_of(message) in self._common:
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
