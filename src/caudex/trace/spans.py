"""Spans and log records of tracers (OpenTelemetry GenAI, OpenInference, OpenLLMetry), as plain objects with the keys
that request bodies have.

OTLP writes attributes as lists of typed values, and tracers whose attributes hold no nested values spell lists out in
the keys: `gen_ai.prompt.0.role`, `llm.input_messages.0.message.content`, `llm.tools.0.tool.json_schema`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_RECORDS = {"resourceSpans": ("scopeSpans", "spans"), "resourceLogs": ("scopeLogs", "logRecords")}
_MESSAGE_PREFIXES = ("gen_ai.prompt", "llm.input_messages")
_TOOL_PREFIXES = ("llm.request.functions", "llm.tools")
_MESSAGE_EVENTS = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}


def is_otlp(value: Mapping[str, Any]) -> bool:
    """Whether this is an export of spans or of log records."""
    return any(key in value for key in _RECORDS)


def otlp_records(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every span and log record of an export."""
    for resources, (scopes, records) in _RECORDS.items():
        for resource in value.get(resources) or ():
            for scope in resource.get(scopes) or ():
                yield from scope.get(records) or ()


def with_flat_attributes(value: dict[str, Any]) -> dict[str, Any]:
    """A span's attributes as plain keys beside the rest, and what they spell out in keys as `messages` and `tools`.

    Any other object is given back as it is.
    """
    attributes = value.get("attributes")
    if isinstance(attributes, list):
        attributes = _plain_attributes(attributes)
    elif not isinstance(attributes, dict) or not any(key.startswith(("gen_ai.", "llm.")) for key in attributes):
        return value
    found = {**value, "attributes": None, **attributes}
    messages = _spelled_out(attributes, _MESSAGE_PREFIXES) or _event_messages(value.get("events"))
    tools = _spelled_out(attributes, _TOOL_PREFIXES)
    if messages:
        found["messages"] = [_message(item) for item in messages]
    if tools:
        found["tools"] = [_tool(item) for item in tools]
    return found


def _plain_attributes(attributes: list[Any]) -> dict[str, Any]:
    return {item.get("key", ""): _otlp_value(item.get("value")) for item in attributes if isinstance(item, dict)}


def _otlp_value(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        return value
    kind, inner = next(iter(value.items()))
    if kind == "arrayValue":
        return [_otlp_value(item) for item in inner.get("values", [])]
    if kind == "kvlistValue":
        return {item["key"]: _otlp_value(item.get("value")) for item in inner.get("values", [])}
    return int(inner) if kind == "intValue" else inner


def _spelled_out(attributes: Mapping[str, Any], prefixes: tuple[str, ...]) -> list[Any]:
    """The list that keys of `prefix.0.name`, `prefix.1.name`, ... amount to; empty where there are none."""
    for prefix in prefixes:
        nested: dict[str, Any] = {}
        for key, value in attributes.items():
            if key.startswith(f"{prefix}."):
                _put(nested, key[len(prefix) + 1 :].split("."), value)
        if nested and all(key.isdigit() for key in nested):
            return list(_with_lists(nested))
    return []


def _put(into: dict[str, Any], path: list[str], value: Any) -> None:
    *outer, last = path
    for name in outer:
        inner = into.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        into = inner
    into[last] = value


def _with_lists(value: Any) -> Any:
    """Objects whose keys are numbers, as lists."""
    if not isinstance(value, dict):
        return value
    if value and all(key.isdigit() for key in value):
        return [_with_lists(value[key]) for key in sorted(value, key=int)]
    return {key: _with_lists(inner) for key, inner in value.items()}


def _message(item: Any) -> dict[str, Any]:
    message = dict(item.get("message", item)) if isinstance(item, dict) else {"content": item}
    contents = message.pop("contents", None)
    if contents and "content" not in message:
        message["content"] = [_content_part(part) for part in contents]
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _content_part(part: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = part.get("message_content", part)
    return inner


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    call = call.get("tool_call", call)
    function = call.get("function") or {"name": call.get("name", ""), "arguments": call.get("arguments", "{}")}
    return {"id": call.get("id", ""), "type": "function", "function": function}


def _tool(item: dict[str, Any]) -> Any:
    tool = item.get("tool", item)
    if isinstance(schema := tool.get("json_schema"), str):
        return _decoded(schema)
    return {**tool, "parameters": _decoded(tool["parameters"])} if "parameters" in tool else tool


def _event_messages(events: Any) -> list[dict[str, Any]]:
    """Messages that a span has as events, as conventions up to 1.36 had them."""
    messages = []
    for event in events if isinstance(events, list) else ():
        role = _MESSAGE_EVENTS.get(str(event.get("name")))
        if role is None:
            continue
        attributes = event.get("attributes") or {}
        told = _plain_attributes(attributes) if isinstance(attributes, list) else attributes
        inner = _decoded(told.get("gen_ai.event.content", "{}"))
        messages.append({"role": role, **{key: told[key] for key in ("content", "tool_calls", "id") if key in told}})
        messages[-1].update(inner if isinstance(inner, dict) else {"content": inner})
    return messages


def _decoded(value: Any) -> Any:
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return value
