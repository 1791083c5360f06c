"""One logged request, as it came off the wire: before rendering, before tokenising."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""A chat message in OpenAI's shape: `role`, `content` (a string), and where they apply `tool_calls`, `tool_call_id`,
`name` and `reasoning_content`. Other vendors' shapes are turned into this one on reading."""

Tool: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Request:
    """A request's prompt in exactly one of four forms, and what the log says around it.

    The forms, from most to least telling: `messages` (with `tools`), `text`, `token_ids`, `hash_ids` (prefix-chained
    block ids of `block_size` tokens). `timestamp` is in seconds. `output` is the response's text or token ids, where
    it was logged. `input_length` and `output_length` are tokens as the log counts them; None where it does not.
    """

    line: int
    request_id: str | None = None
    timestamp: float | None = None
    session: str | None = None
    tenant: str | None = None
    model: str | None = None
    lora: str | None = None
    salt: str | None = None
    replica: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    hash_ids: Sequence[int] | None = None
    block_size: int | None = None
    input_length: int | None = None
    output_length: int | None = None
    output: str | list[int] | None = None

    @property
    def namespace(self) -> tuple[str, str, str]:
        """What splits a cache: blocks are never shared between two models, adapters or salts."""
        return (self.model or "", self.lora or "", self.salt or "")
