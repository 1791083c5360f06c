"""From a request's body to what routing may know of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import msgspec

from caudex.gateway.http_messages import HttpError
from caudex.routing import RouteRequest, text_request

_EMPTY = msgspec.Raw(b"")
_MAX_SESSION_NAME = 128
"""A longer name is known by its hash, since hundreds of thousands of them are kept."""


class Body(msgspec.Struct):
    """The fields of an OpenAI-shaped body that the gateway looks at. What is large stays raw: it is only hashed."""

    model: Any = ""
    stream: Any = False
    tools: msgspec.Raw = _EMPTY
    instructions: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY
    session_id: Any = None
    user: Any = None
    previous_response_id: Any = None
    cache_salt: Any = None
    priority: Any = 0


_decoder = msgspec.json.Decoder(Body)


def decode_body(body: bytes) -> Body:
    """HttpError 400 where the body is not a JSON object."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not a JSON object: {error}") from error


def describe(body: Body, *, session_header: bytes | None, tenant: str, salt: str) -> RouteRequest:
    """The request's features. The text is what the prompt is rendered from, in the order templates render it: tools,
    instructions, then messages (or prompt, or input), as the client wrote them."""
    text = bytes(body.tools) + bytes(body.instructions) + bytes(body.messages) + bytes(body.prompt) + bytes(body.input)
    request = text_request(
        text,
        model=body.model if isinstance(body.model, str) else "",
        salt=salt,
        session=_session(body, session_header),
        tenant=tenant,
        priority=body.priority if isinstance(body.priority, int) else 0,
    )
    if _is_token_list(body.prompt):
        return _with_length(request, bytes(body.prompt).count(b",") + 1)
    return request


def _session(body: Body, header: bytes | None) -> str | None:
    names = (header.decode("latin-1") if header else None, body.session_id, body.user)
    name = next((name for name in names if isinstance(name, str) and name), None)
    if name is None or len(name) <= _MAX_SESSION_NAME:
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def _is_token_list(prompt: msgspec.Raw) -> bool:
    start = bytes(prompt)[:16].replace(b" ", b"").replace(b"\n", b"")
    return len(start) > 1 and start[:1] == b"[" and start[1:2].isdigit()


def _with_length(request: RouteRequest, num_tokens: int) -> RouteRequest:
    chunk_tokens = request.tokens_per_key * num_tokens / max(1, request.num_tokens)
    return replace(request, num_tokens=num_tokens, tokens_per_key=chunk_tokens)
