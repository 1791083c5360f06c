"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

import msgspec

ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def event(payload: Any, name: str | None = None) -> bytes:
    """One event: its name if it has one, then the payload as JSON on one line."""
    data = b"data: " + ENCODER.encode(payload) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data
