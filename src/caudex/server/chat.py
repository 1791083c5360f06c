"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from caudex.engine.types import FinishReason, TokenLogprob
from caudex.server import sse
from caudex.server.conversation import template_messages
from caudex.server.endpoint import Caller, Choice, Prepared
from caudex.server.errors import APIError
from caudex.server.fields import GenerationFields, check_prompt_logprobs, decode_body, generation_requests
from caudex.server.generation import ChoiceOutput
from caudex.server.logprobs import prompt_logprobs
from caudex.server.service import Service, new_id
from caudex.server.tool_calls import ToolCall, ToolCallReader
from caudex.server.tools import calls_grammar, forced_functions, functions_of
from caudex.server.usage import usage


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def names_function(self) -> bool:
        """Whether `tool_choice` names the function to call."""
        return isinstance(self.tool_choice, dict)

    @property
    def may_call_several(self) -> bool:
        """Whether an answer may have more than one call."""
        return self.parallel_tool_calls is not False and not self.names_function


def prepare(service: Service, body: bytes, caller: Caller) -> Prepared:
    fields = decode_body(body, ChatRequest)
    model = service.check_model(fields.model)
    check_prompt_logprobs(fields)
    functions = functions_of(fields.tools or ())
    forced = forced_functions(fields.tool_choice, functions)
    service.check_choices(fields.num_samples)
    prompt = render(service, fields)
    field = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    allowed = service.tokens_left(len(prompt), getattr(fields, field), field=field)
    requests = generation_requests(
        fields,
        caller,
        prompt,
        max_tokens=allowed,
        logprobs=num_logprobs(fields),
        adapter=service.adapter_of(model),
        prompt_logprobs=fields.prompt_logprobs,
        grammar=calls_grammar(forced, many=fields.may_call_several) if forced else None,
    )
    return Prepared(requests, ChatRenderer(service, fields, model, prompt), bool(fields.stream))


def render(service: Service, fields: ChatRequest) -> list[int]:
    """The conversation as token ids, through the model's template."""
    continued = bool(fields.continue_final_message)
    if continued and fields.add_generation_prompt is not False:
        fields.add_generation_prompt = False
    tools = None if fields.tool_choice == "none" else fields.tools
    return service.render_chat(
        template_messages(fields.messages),
        tools=tools or None,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=continued,
        variables=fields.chat_template_kwargs,
    )


def num_logprobs(fields: ChatRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise APIError(f"top_logprobs is {fields.top_logprobs}, which needs logprobs: true", param="top_logprobs")
    return None


class ChatRenderer:
    """Writes `chat.completion` objects, or `chat.completion.chunk` events of which each choice's first has the role."""

    def __init__(self, service: Service, fields: ChatRequest, model: str, prompt: list[int]) -> None:
        self._token = service.engine.tokenizer.token
        self._fields = fields
        self._prompt = prompt
        self._samples = fields.num_samples
        self._frame = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}
        self._takes_calls = bool(fields.tools) and fields.tool_choice != "none"
        self._readers = [ToolCallReader() for _ in range(self._samples)]
        self._num_calls = [0] * self._samples
        self._is_plain = not (self._shows_tokens or self._takes_calls or fields.usage_in_chunks)
        self._texts: dict[int, sse.TextEvent] = {}

    def event(self, item: ChoiceOutput, choices: list[Choice]) -> bytes:
        output = item.output
        opening = self._opening(item.choice, choices) if choices[item.choice].begins_with(output) else b""
        if not output.text and output.finish_reason is None and not self._shows_tokens:
            return opening
        if self._is_plain and output.finish_reason is None:
            return opening + self._text_event(item.choice).with_text(output.text)
        rendered: dict[str, Any] = {
            "index": item.choice,
            "delta": self._delta(item),
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": self._finish_reason(item.choice, output.finish_reason),
        }
        if output.finish_reason is not None:
            rendered["stop_reason"] = output.stop_reason
        if self._fields.return_token_ids:
            rendered["token_ids"] = output.token_ids
        return opening + self._chunk([rendered], choices)

    def closing(self, choices: list[Choice]) -> bytes:
        if not self._fields.usage_at_end:
            return sse.DONE
        last = {"object": "chat.completion.chunk", "choices": [], "usage": usage(choices, self._samples)}
        return sse.event(self._frame | last) + sse.DONE

    def failure(self, error: APIError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + sse.DONE

    def body(self, choices: list[Choice]) -> bytes:
        rendered = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        answer: dict[str, Any] = {"object": "chat.completion", "choices": rendered}
        answer["usage"] = usage(choices, self._samples)
        if self._fields.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs, self._token)
        return msgspec.json.encode(self._frame | answer)

    @property
    def _shows_tokens(self) -> bool:
        return bool(self._fields.logprobs or self._fields.return_token_ids)

    def _text_event(self, index: int) -> sse.TextEvent:
        """What a choice's text is sent in while nothing else is to be told."""
        if index not in self._texts:
            rendered = {"index": index, "logprobs": None, "finish_reason": None}
            self._texts[index] = sse.TextEvent(lambda text: self._chunk([rendered | {"delta": {"content": text}}], []))
        return self._texts[index]

    def _opening(self, index: int, choices: list[Choice]) -> bytes:
        delta = {"role": "assistant", "content": ""}
        rendered: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._fields.return_token_ids:
            rendered["prompt_token_ids"] = self._prompt
        return self._chunk([rendered], choices)

    def _chunk(self, rendered: list[dict[str, Any]], choices: list[Choice]) -> bytes:
        chunk: dict[str, Any] = self._frame | {"object": "chat.completion.chunk", "choices": rendered}
        if self._fields.usage_in_chunks:
            chunk["usage"] = usage(choices, self._samples)
        elif self._fields.usage_at_end:
            chunk["usage"] = None
        return sse.event(chunk)

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        rendered: dict[str, Any] = {
            "index": index,
            "message": self._message(index, choice),
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(index, choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }
        if self._fields.return_token_ids:
            rendered |= {"prompt_token_ids": self._prompt, "token_ids": choice.token_ids}
        return rendered

    def _delta(self, item: ChoiceOutput) -> dict[str, Any]:
        """What a chunk adds to its choice: text, calls, or both."""
        text, finished = item.output.text, item.output.finish_reason is not None
        if not self._takes_calls:
            return {"content": text} if text else {}
        return self._split(item.choice, text, finished)

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if self._takes_calls:
            message |= {"content": None} | self._split(index, choice.text, True)
        return message

    def _split(self, index: int, text: str, finished: bool) -> dict[str, Any]:
        """A piece of a choice's text as `content` and `tool_calls`, each where there is any."""
        reader = self._readers[index]
        found: dict[str, Any] = {}
        items = reader.feed(text) + (reader.finish() if finished else [])
        said = "".join(item for item in items if isinstance(item, str))
        calls = [item for item in items if isinstance(item, ToolCall)]
        if said:
            found["content"] = said
        first = self._num_calls[index]
        if not self._fields.may_call_several:
            calls = calls[: 1 - first]
        if calls:
            found["tool_calls"] = [call.rendered(first + place) for place, call in enumerate(calls)]
            self._num_calls[index] += len(calls)
        return found

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        """As OpenAI has it: `tool_calls` where the model chose to call, `stop` where it was told which function."""
        chosen = self._num_calls[index] and not self._fields.names_function
        return "tool_calls" if reason == "stop" and chosen else reason

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        return {"content": [self._token_logprob(entry) for entry in entries], "refusal": None}

    def _token_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._scored(token, value) for token, value in entry.top]
        return self._scored(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
