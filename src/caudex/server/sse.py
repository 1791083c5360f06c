"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(payload: Any, name: str | None = None) -> bytes:
    """One event: its name if it has one, then the payload as JSON on one line."""
    data = b"data: " + ENCODER.encode(payload) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class TextEvent:
    """An event of which all but one text stays: rendered once, and cut where the text goes.

    Args:
        render: the event for a given text, which is to be in it once.
    """

    _PLACE = "\ue000 the text \ue000"

    def __init__(self, render: Callable[[str], bytes]) -> None:
        self._head, self._tail = render(self._PLACE).split(ENCODER.encode(self._PLACE))

    def with_text(self, text: str) -> bytes:
        return self._head + ENCODER.encode(text) + self._tail
