"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from caudex.engine.types import GenerationRequest, TokenLogprob
from caudex.server import sse
from caudex.server.endpoint import Caller, Choice, Prepared
from caudex.server.errors import APIError
from caudex.server.fields import GenerationFields, decode_body, generation_requests
from caudex.server.generation import ChoiceOutput
from caudex.server.service import Service, new_id
from caudex.server.usage import usage

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this path."""

LARGEST_VOCABULARY = 2**31
"""Token ids are 32-bit integers below; the engine knows how many of them its model has."""


class CompletionRequest(GenerationFields, kw_only=True):
    """`prompt` may be a string, a list of strings, token ids, or a list of lists of token ids."""

    prompt: Any = None
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool | None = True
    suffix: str | None = None
    best_of: int | None = None


def prepare(service: Service, body: bytes, caller: Caller) -> Prepared:
    fields = decode_body(body, CompletionRequest)
    model = service.check_model(fields.model)
    if fields.echo and fields.logprobs is not None:
        raise APIError("echo with logprobs needs prompt log-probabilities; ask for one of them", param="echo")
    prompts = token_prompts(service, fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    service.check_choices(len(prompts) * fields.num_samples)
    requests: list[GenerationRequest] = []
    completion_id = new_id("cmpl")
    for prompt in prompts:
        asked = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        allowed = service.tokens_left(len(prompt), asked, field="max_tokens")
        requests += generation_requests(
            fields, caller, prompt, max_tokens=allowed, logprobs=fields.logprobs, adapter=service.adapter_of(model)
        )
    echoes = [service.engine.tokenizer.decode(prompt) if fields.echo else "" for prompt in prompts]
    renderer = CompletionRenderer(service, fields, completion_id, model, prompts, echoes)
    return Prepared(requests, renderer, bool(fields.stream))


def token_prompts(service: Service, prompt: Any, *, add_special_tokens: bool) -> list[list[int]]:
    """All prompts of a request as token ids.

    Raises:
        APIError: 400; `prompt` is none of the four forms, or holds a token id that the model does not have.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise wrong_prompt(prompt)
    if all(type(item) is int for item in prompt):
        prompt = [prompt]
    return [token_prompt(service, item, add_special_tokens) for item in prompt]


def token_prompt(service: Service, item: Any, add_special_tokens: bool) -> list[int]:
    if isinstance(item, str):
        return service.engine.tokenizer.encode(item, add_special_tokens=add_special_tokens)
    if not isinstance(item, list) or not all(type(token) is int for token in item):
        raise wrong_prompt(item)
    for token in item:
        if not 0 <= token < LARGEST_VOCABULARY:
            raise APIError(f"prompt has {token}, which is no token id", param="prompt")
    return item


def wrong_prompt(value: Any) -> APIError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return APIError(
        f"prompt is {shown}; expected a string, a list of strings, token ids, or a list of lists of token ids",
        param="prompt",
    )


class CompletionRenderer:
    """Writes `text_completion` objects, whole or in chunks."""

    def __init__(
        self,
        service: Service,
        fields: CompletionRequest,
        completion_id: str,
        model: str,
        prompts: Sequence[list[int]],
        echoes: Sequence[str],
    ) -> None:
        self._token = service.engine.tokenizer.token
        self._fields = fields
        self._samples = fields.num_samples
        self._frame = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._prompts = prompts
        self._echoes = echoes
        self._seen = [Choice() for _ in range(len(prompts) * self._samples)]
        self._offsets = [0] * len(self._seen)

    def event(self, item: ChoiceOutput) -> bytes:
        output, choice = item.output, self._seen[item.choice]
        first = not choice.token_ids
        choice.add(output)
        text = self._echoes[item.choice // self._samples] + output.text if first else output.text
        if not text and output.finish_reason is None and not self._shows_tokens:
            return b""
        rendered = self._choice(item.choice, text, output.token_ids, output.logprobs)
        rendered |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return sse.event(self._chunk([rendered]))

    def closing(self, choices: list[Choice]) -> bytes:
        if not self._fields.usage_at_end:
            return sse.DONE
        return sse.event(self._frame | {"choices": [], "usage": usage(choices, self._samples)}) + sse.DONE

    def failure(self, error: APIError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + sse.DONE

    def body(self, choices: list[Choice]) -> bytes:
        rendered = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        return msgspec.json.encode(self._frame | {"choices": rendered, "usage": usage(choices, self._samples)})

    @property
    def _shows_tokens(self) -> bool:
        return self._fields.logprobs is not None or bool(self._fields.return_token_ids)

    def _chunk(self, rendered: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._frame | {"choices": rendered}
        if self._fields.usage_in_chunks:
            chunk["usage"] = usage(self._seen, self._samples)
        elif self._fields.usage_at_end:
            chunk["usage"] = None
        return chunk

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self._echoes[index // self._samples] + choice.text
        rendered = self._choice(index, text, choice.token_ids, choice.logprobs)
        return rendered | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _choice(
        self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        rendered: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self._fields.logprobs is not None:
            rendered["logprobs"] = self._logprobs(index, logprobs)
        if self._fields.return_token_ids:
            rendered |= {"prompt_token_ids": self._prompts[index // self._samples], "token_ids": token_ids}
        return rendered

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._token(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Text to log-probability. Of tokens that look alike (parts of characters do) the likeliest stands for all."""
        return {self._token(token): value for token, value in reversed(entry.top)}
