"""OpenAI's chat messages as chat templates take them."""

from __future__ import annotations

from typing import Any

import msgspec

from caudex.server.errors import APIError


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain text content and with tool calls whose arguments are objects; all else as it was sent.

    Raises:
        APIError: 400; there are none, or one has no role, or content that is not text.
    """
    if not messages:
        raise APIError("messages is empty; at least one message is needed", param="messages")
    return [template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def template_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise APIError(f"{place}.role is {role!r}; expected 'system', 'user', 'assistant' or 'tool'", param=place)
    ready = dict(message, content=text_of(message.get("content"), place))
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise APIError(f"{place}.tool_calls is {calls!r:.80}; expected a list", param=place)
        ready["tool_calls"] = [tool_call(call, place) for call in calls]
    return ready


def text_of(content: Any, place: str) -> str:
    """The text of a message: a string, or parts of type `text`, joined by line ends as vLLM joins them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise APIError(f"{place}.content is {content!r:.80}; expected a string or a list of parts", param=place)
    return "\n".join(part_text(part, place) for part in content)


def part_text(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise APIError(f"{place}.content has a part of type {kind!r}; this model takes text only", param=place)
    return text


def tool_call(call: Any, place: str) -> dict[str, Any]:
    """A tool call with its arguments parsed: templates print them as JSON themselves, and would quote a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise APIError(f"{place}.tool_calls has an entry without a function", param=place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as exc:
            raise APIError(f"{place}.tool_calls has arguments that are not JSON: {exc}", param=place) from None
    return dict(call, function=dict(function, arguments=arguments))
