"""What a detector hands over: a suspected breaker with the rewrite that would mend it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from caudex.trace.request import Request

Rewrite: TypeAlias = Callable[[list[Request]], list[Request]]
"""The mended log. Takes and gives a list of the same length and order, and changes no request in place."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a request something sits. Indices and offsets are from 0; what does not apply is None.

    `char` counts characters of the message's content (or of the tool's JSON), `token` tokens of the whole prompt.
    """

    description: str
    message: int | None = None
    role: str | None = None
    tool: str | None = None
    char: int | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One value that a breaker took: the line of the log it is in, the value, and the text around it."""

    line: int
    value: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A suspected breaker. It becomes a finding only if replaying the mended log shows that it costs something.

    `pair` is two requests (indices) whose prompts part at the breaker; the token offset is measured on them. `rule` is
    a machine-readable rewrite, given only where applying it to live traffic is safe: never for what users wrote.
    """

    kind: str
    title: str
    place: Place
    examples: tuple[Example, ...]
    mend: str
    rewrite: Rewrite
    pair: tuple[int, int] | None = None
    rule: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    min_gain: float = 0.003
    """The least gain in hit rate at which this is worth telling; higher where the evidence is weaker."""
