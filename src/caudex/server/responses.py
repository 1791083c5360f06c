"""POST /v1/responses: OpenAI's newer protocol, without the state that it can keep on a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from caudex.server import sse
from caudex.server.conversation import template_messages
from caudex.server.endpoint import Caller, Choice, Prepared
from caudex.server.errors import APIError
from caudex.server.fields import GenerationFields, decode_body, generation_requests
from caudex.server.generation import ChoiceOutput
from caudex.server.service import Service, new_id


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """`input` is a string or a list of messages."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    previous_response_id: str | None = None
    cache_salt: str | None = None
    tools: list[dict[str, Any]] | None = None


def prepare(service: Service, body: bytes, caller: Caller) -> Prepared:
    request = decode_body(body, ResponsesRequest)
    model = service.check_model(request.model)
    if request.previous_response_id is not None:
        raise APIError("this server keeps no responses; send the whole conversation", param="previous_response_id")
    if request.tools:
        raise APIError("this path takes no tools; /v1/chat/completions does", param="tools")
    prompt = service.render_chat(template_messages(messages_of(request)))
    allowed = service.tokens_left(len(prompt), request.max_output_tokens, field="max_output_tokens")
    fields = GenerationFields(temperature=request.temperature, top_p=request.top_p, cache_salt=request.cache_salt)
    requests = generation_requests(
        fields, caller, prompt, max_tokens=allowed, logprobs=None, adapter=service.adapter_of(model)
    )
    return Prepared(requests, ResponseRenderer(model), bool(request.stream))


def messages_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as chat messages, after the instructions.

    Raises:
        APIError: 400; an item of the input is no message.
    """
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        return [*system, {"role": "user", "content": request.input}]
    for item in request.input:
        if item.get("type", "message") != "message":
            raise APIError(f"input has an item of type {item['type']!r}; this server takes messages", param="input")
    kept = [{"role": item.get("role"), "content": item.get("content")} for item in request.input]
    return [*system, *kept]


class ResponseRenderer:
    """Writes a `response`, or the events from `response.created` to `response.completed`, numbered in order."""

    def __init__(self, model: str) -> None:
        self._id, self._item_id = new_id("resp"), new_id("msg")
        self._frame = {"id": self._id, "object": "response", "created_at": int(time.time()), "model": model}
        self._number = 0
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def event(self, item: ChoiceOutput, choices: list[Choice]) -> bytes:
        opening = b"" if self._number else self._opening()
        if not item.output.text:
            return opening
        return opening + self._event("response.output_text.delta", **self._place, delta=item.output.text, logprobs=[])

    def closing(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        return b"".join(
            [
                self._event("response.output_text.done", **self._place, text=choice.text, logprobs=[]),
                self._event("response.content_part.done", **self._place, part=text_part(choice.text)),
                self._event("response.output_item.done", output_index=0, item=self._item(choice.text, "completed")),
                self._event(f"response.{status(choice)}", response=self._response(choice)),
            ]
        )

    def failure(self, error: APIError) -> bytes:
        failed = self._state("failed", []) | {"error": {"code": error.code or "server_error", "message": error.message}}
        return self._event("response.failed", response=failed)

    def body(self, choices: list[Choice]) -> bytes:
        (choice,) = choices
        return msgspec.json.encode(self._response(choice))

    def _opening(self) -> bytes:
        begun = self._state("in_progress", [])
        return b"".join(
            [
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=self._item(None, "in_progress")),
                self._event("response.content_part.added", **self._place, part=text_part("")),
            ]
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = sse.event({"type": kind, "sequence_number": self._number, **fields}, kind)
        self._number += 1
        return made

    def _response(self, choice: Choice) -> dict[str, Any]:
        state = self._state(status(choice), [self._item(choice.text, "completed")]) | {"usage": usage(choice)}
        if choice.finish_reason == "length":
            state["incomplete_details"] = {"reason": "max_output_tokens"}
        return state

    def _state(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        settled: dict[str, Any] = {"error": None, "incomplete_details": None, "tools": [], "tool_choice": "auto"}
        return self._frame | settled | {"parallel_tool_calls": False, "status": status, "output": output}

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [text_part(text)]
        return {"type": "message", "id": self._item_id, "role": "assistant", "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def usage(choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": choice.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": choice.num_cached_tokens},
        "output_tokens": len(choice.token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": choice.num_prompt_tokens + len(choice.token_ids),
    }
