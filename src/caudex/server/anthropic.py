"""POST /v1/messages: Anthropic's protocol over the same engine."""

from __future__ import annotations

from typing import Any

import msgspec

from caudex.server import sse
from caudex.server.conversation import template_messages
from caudex.server.endpoint import Caller, Choice, Prepared
from caudex.server.errors import APIError
from caudex.server.fields import GenerationFields, decode_body, generation_requests
from caudex.server.generation import ChoiceOutput
from caudex.server.service import Service, new_id


class MessagesRequest(msgspec.Struct, kw_only=True):
    """`system` and each message's `content` are a string or a list of text blocks."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None
    tools: list[dict[str, Any]] | None = None


def prepare(service: Service, body: bytes, caller: Caller) -> Prepared:
    request = decode_body(body, MessagesRequest)
    model = service.check_model(request.model)
    if request.tools:
        raise APIError("this path takes no tools; /v1/chat/completions does", param="tools")
    system = [{"role": "system", "content": request.system}] if request.system else []
    prompt = service.render_chat(template_messages([*system, *request.messages]))
    allowed = service.tokens_left(len(prompt), request.max_tokens, field="max_tokens")
    fields = GenerationFields(
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        cache_salt=request.cache_salt,
    )
    requests = generation_requests(
        fields, caller, prompt, max_tokens=allowed, logprobs=None, adapter=service.adapter_of(model)
    )
    return Prepared(requests, MessageRenderer(model), bool(request.stream))


class MessageRenderer:
    """Writes a `message`, or the events from `message_start` to `message_stop`."""

    def __init__(self, model: str) -> None:
        self._id = new_id("msg")
        self._model = model
        self._started = False

    def event(self, item: ChoiceOutput, choices: list[Choice]) -> bytes:
        text = item.output.text
        opening = b"" if self._started else self._opening(item)
        if not text:
            return opening
        return opening + DELTA.with_text(text)

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        ending = {"type": "message_delta", "delta": stop(choice), "usage": usage(choice)}
        return named({"type": "content_block_stop", "index": 0}) + named(ending) + named({"type": "message_stop"})

    def failure(self, error: APIError) -> bytes:
        return named({"type": "error", "error": {"type": "api_error", "message": error.message}})

    def body(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        content = [{"type": "text", "text": choice.text}]
        return msgspec.json.encode(self._message(content) | stop(choice) | {"usage": usage(choice)})

    def _opening(self, item: ChoiceOutput) -> bytes:
        self._started = True
        begun = Choice(num_prompt_tokens=item.output.num_prompt_tokens, num_cached_tokens=item.output.num_cached_tokens)
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage(begun)}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return named({"type": "message_start", "message": message}) + named(block)

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}


def named(event: dict[str, Any]) -> bytes:
    return sse.event(event, event["type"])


def text_delta(text: str) -> bytes:
    return named({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}})


DELTA = sse.TextEvent(text_delta)


def stop(choice: Choice) -> dict[str, Any]:
    if choice.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def usage(choice: Choice) -> dict[str, int]:
    """Anthropic counts what the cache gave apart: the three inputs add up to the prompt."""
    return {
        "input_tokens": choice.num_prompt_tokens - choice.num_cached_tokens,
        "cache_read_input_tokens": choice.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(choice.token_ids),
    }
