"""What a planted breaker is, and how the texts of a body are changed without touching the body itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

Body: TypeAlias = dict[str, Any]
Mutator: TypeAlias = Callable[[list[Body]], list[Body]]

START = datetime(2026, 3, 1, 9, 58, 41)


@dataclass(frozen=True)
class Plant:
    """`kinds` name the breaker rightly; `place` is a pattern that the found place's description must match.

    `needs` says what a log must have for the plant to take hold: "messages", "tools", "turns" (conversations of many
    turns), "sessions", "short" (conversations of one turn). `slack` is how far the mended rate may lie from the clean
    log's: more than a point only where the mend cannot give back the clean log itself.
    """

    name: str
    kinds: frozenset[str]
    place: str
    mutate: Mutator
    needs: frozenset[str] = frozenset({"messages"})
    slack: float = 0.01
    clean: Mutator = list
    """The same log with the breaker's content in place and not broken, where the plant adds any."""

    details: dict[str, Any] = field(default_factory=dict)


def plant(
    name: str, kinds: str, place: str, mutate: Mutator, needs: str = "messages", slack: float = 0.01,
    clean: Mutator = list, **details: Any,
) -> Plant:  # fmt: skip
    """A plant from words: `kinds` and `needs` are lists separated by blanks."""
    return Plant(name, frozenset(kinds.split()), place, mutate, frozenset(needs.split()), slack, clean, details)


def in_head(body: Body, change: Callable[[str], str]) -> Body:
    """Changes the operator's text: the system message, or a plain prompt from its beginning on."""
    if "prompt" in body:
        return {**body, "prompt": change(body["prompt"])}
    return in_message(body, 0, change)


def in_message(body: Body, index: int, change: Callable[[str], str]) -> Body:
    messages = list(body["messages"])
    messages[index] = {**messages[index], "content": change(messages[index]["content"])}
    return {**body, "messages": messages}


def insert_line(text: str, line: str, share: float, fixed_chars: int | None = None) -> str:
    """Puts a line where `share` of the text's first `fixed_chars` characters are before it."""
    most = len(text) if fixed_chars is None else min(fixed_chars, len(text))
    at = text.find("\n", int(share * most)) + 1 if share > 0 else 0
    if share >= 1 or (at == 0 and share > 0):
        return f"{text}\n{line}"
    return f"{text[:at]}{line}\n{text[at:]}"


def at_line(line_of: Callable[[int, Body], str], share: float) -> Mutator:
    """Plants a line in each request's system message (or plain prompt, within its first 1,200 characters)."""
    return lambda log: [
        in_head(
            body,
            lambda text, n=n, body=body: insert_line(  # type: ignore[misc]
                text, line_of(n, body), share, 1200 if "prompt" in body else None
            ),
        )
        for n, body in enumerate(log)
    ]


def session_of(body: Body) -> str:
    return str(body.get("session_id", ""))


def chosen_by_session(body: Body, names: Iterable[str]) -> str:
    pool = list(names)
    return pool[random.Random(session_of(body)).randrange(len(pool))]


def by_session(log: list[Body]) -> dict[str, list[Body]]:
    sessions: dict[str, list[Body]] = {}
    for body in log:
        sessions.setdefault(session_of(body), []).append(body)
    return sessions
