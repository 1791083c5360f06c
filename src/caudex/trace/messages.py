"""Chat messages and tools of every vendor, turned into OpenAI's shape (the one chat templates are written for)."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from caudex.trace.request import Message, Tool

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"})
_REASONING_PARTS = frozenset({"thinking", "reasoning", "redacted_thinking"})
_CALL_PARTS = frozenset({"tool_use", "tool_call", "function_call"})
_RESULT_PARTS = frozenset({"tool_result", "tool_call_response", "function_call_output"})


def normalize_messages(items: list[Any], system: object = None) -> list[Message]:
    """Messages of OpenAI (chat and responses), Anthropic, Gemini, Bedrock or OpenTelemetry, as OpenAI chat messages.

    Raises:
        ValueError: an item is neither a message nor a known kind of response item.
    """
    messages: list[Message] = []
    if system:
        messages.append({"role": "system", "content": _plain_text(system)})
    for item in items:
        messages.extend(_normalize(item))
    return messages


def _normalize(item: Any) -> list[Message]:
    if isinstance(item, str):
        return [{"role": "user", "content": item}]
    if not isinstance(item, dict):
        raise ValueError(f"a message is {type(item).__name__}, not an object")
    kind = item.get("type")
    if kind in _CALL_PARTS and "role" not in item:
        return [{"role": "assistant", "content": "", "tool_calls": [_tool_call(item)]}]
    if kind in _RESULT_PARTS and "role" not in item:
        return [_tool_result(item)]
    if kind == "reasoning" and "role" not in item:
        return [{"role": "assistant", "content": "", "reasoning_content": _plain_text(item.get("summary"))}]
    if "role" not in item:
        raise ValueError("a message has no role")
    content = item.get("content", item.get("parts"))
    if content is None or isinstance(content, str):
        return [_without_noise(item, content)]
    return _from_parts(item, content if isinstance(content, list) else [content])


def _without_noise(item: Message, content: str | None) -> Message:
    message: Message = {"role": _role(item["role"])}
    if "content" in item or "parts" in item:
        message["content"] = content
    for key in ("tool_calls", "tool_call_id", "name", "reasoning_content"):
        if item.get(key):
            message[key] = item[key]
    if "reasoning_content" not in message and isinstance(item.get("reasoning"), str):
        message["reasoning_content"] = item["reasoning"]
    return message


def _role(role: object) -> str:
    name = str(role)
    return {"model": "assistant", "developer": "system", "ai": "assistant", "human": "user"}.get(name, name)


def _from_parts(item: Message, parts: list[Any]) -> list[Message]:
    """One message of parts becomes one message, with the tool results in it before it, each a message of its own."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = list(item.get("tool_calls") or ())
    results: list[Message] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and "functionCall" in part:
            part, kind = part["functionCall"], "function_call"
        elif isinstance(part, dict) and "functionResponse" in part:
            part, kind = part["functionResponse"], "tool_result"
        elif isinstance(part, dict) and "toolUse" in part:
            part, kind = part["toolUse"], "tool_use"
        elif isinstance(part, dict) and "toolResult" in part:
            part, kind = part["toolResult"], "tool_result"
        if kind in _CALL_PARTS:
            calls.append(_tool_call(part))
        elif kind in _RESULT_PARTS:
            results.append(_tool_result(part))
        elif kind in _REASONING_PARTS:
            reasoning.append(_plain_text(part.get("thinking") or part.get("content") or part.get("text") or ""))
        else:
            texts.append(_plain_text(part))
    message = _without_noise({**item, "tool_calls": calls}, "\n".join(texts))
    message["content"] = "\n".join(texts)
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if results and not texts and not calls:
        return results
    return [*results, message]


def _tool_call(part: dict[str, Any]) -> dict[str, Any]:
    arguments = part.get("arguments", part.get("input", part.get("args", {})))
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    call_id = part.get("call_id") or part.get("id") or part.get("toolUseId") or ""
    return {"id": call_id, "type": "function", "function": {"name": part.get("name", ""), "arguments": arguments}}


def _tool_result(part: dict[str, Any]) -> Message:
    content = part.get("content", part.get("output", part.get("response", part.get("result", ""))))
    call_id = part.get("tool_use_id") or part.get("call_id") or part.get("id") or part.get("toolUseId") or ""
    return {"role": "tool", "tool_call_id": call_id, "content": _plain_text(content)}


def _plain_text(value: object) -> str:
    """The text of a part or of nested parts. What is not text (an image, a file) becomes a placeholder with the hash
    of its content, so that equal content matches and different content does not."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(_plain_text(part) for part in value)
    if isinstance(value, dict):
        kind = value.get("type", "text")
        if kind in _TEXT_PARTS:
            text = value.get("text", value.get("content"))
            if isinstance(text, str):
                return text
            if isinstance(text, (list, dict)):
                return _plain_text(text)
        if kind in _TEXT_PARTS or kind == "json":
            return msgspec.json.encode(value).decode()
        digest = hashlib.blake2b(msgspec.json.encode(value), digest_size=8).hexdigest()
        return f"<{kind}:{digest}>"
    return msgspec.json.encode(value).decode()


def normalize_tools(tools: object) -> list[Tool] | None:
    """Tool declarations as OpenAI's `{"type": "function", "function": {...}}`, in the order and with the keys' order
    that the request had, since both are part of the prompt."""
    if isinstance(tools, dict):
        tools = tools.get("tools", [tools])
    if not isinstance(tools, list) or not tools:
        return None
    return [_normalize_tool(tool) for tool in tools]


def _normalize_tool(tool: Any) -> Tool:
    if not isinstance(tool, dict):
        return {"type": "function", "function": {"name": str(tool)}}
    if "function" in tool and isinstance(tool["function"], dict):
        return tool
    if "toolSpec" in tool:
        tool = tool["toolSpec"]
    renamed = {"input_schema": "parameters", "inputSchema": "parameters"}
    function = {renamed.get(key, key): value for key, value in tool.items() if key not in {"type", "cache_control"}}
    return {"type": "function", "function": function}
