"""Tool calls in a model's text, as Hermes and Qwen models write them: JSON between `<tool_call>` tags."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def rendered(self, index: int) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": index, "id": self.id, "type": "function", "function": function}


class ToolCallReader:
    """Splits a text that arrives in pieces into what is said and the calls that are made.

    Text that may be the beginning of a tag is held back until it is known not to be. What stands between tags and is no
    call is given back as text, tags and all: nothing the model wrote is lost.
    """

    def __init__(self) -> None:
        self._held = ""
        self._in_call = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """What `text` settles, in order."""
        self._held += text
        settled: list[str | ToolCall] = []
        while (self._in_call and CLOSE in self._held) or (not self._in_call and OPEN in self._held):
            before, _, self._held = self._held.partition(CLOSE if self._in_call else OPEN)
            settled.append(call_of(before) if self._in_call else before)
            self._in_call = not self._in_call
        if not self._in_call:
            kept = held_back(self._held)
            settled.append(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
        return [item for item in settled if item]

    def finish(self) -> list[str | ToolCall]:
        """What is left when the text has ended."""
        left = (OPEN if self._in_call else "") + self._held
        self._held, self._in_call = "", False
        return [left] if left else []


def held_back(text: str) -> int:
    """Length of the longest end of `text` that an opening tag may begin with."""
    return next((size for size in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-size:])), 0)


def call_of(text: str) -> ToolCall | str:
    try:
        parsed = msgspec.json.decode(text.strip())
        return ToolCall(str(parsed["name"]), msgspec.json.encode(parsed.get("arguments") or {}).decode())
    except (msgspec.DecodeError, UnicodeError, TypeError, KeyError, AttributeError):
        return f"{OPEN}{text}{CLOSE}"
