"""POST /v1/completions: text or token ids in, text out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from caudex.engine.types import GenerationRequest, RequestOutput, TokenLogprob
from caudex.server import sse
from caudex.server.endpoint import Caller, Choice, Prepared
from caudex.server.errors import APIError
from caudex.server.fields import GenerationFields, check_prompt_logprobs, decode_body, generation_requests
from caudex.server.generation import ChoiceOutput
from caudex.server.logprobs import prompt_logprobs
from caudex.server.service import Service, new_id
from caudex.server.usage import usage

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this path."""

LARGEST_VOCABULARY = 2**31
"""Token ids are 32-bit integers below; the engine knows how many of them its model has."""


class CompletionRequest(GenerationFields, kw_only=True):
    """`prompt` may be a string, a list of strings, token ids, or a list of lists of token ids.

    Of `best_of` samples a prompt, the answer has the `n` that the model finds likeliest, token by token.
    """

    prompt: Any = None
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool | None = True
    suffix: str | None = None
    best_of: int | None = None

    @property
    def num_generated(self) -> int:
        """Samples generated for each prompt.

        Raises:
            APIError: 400; `best_of` is below `n`, or a choice is to be made after it was streamed.
        """
        wanted = self.num_samples
        generated = wanted if self.best_of is None else self.best_of
        if generated < wanted:
            raise APIError(f"best_of is {generated}, less than n, which is {wanted}", param="best_of")
        if generated > wanted and self.stream:
            raise APIError(f"best_of is {generated}; samples to choose from cannot be streamed", param="best_of")
        return generated

    @property
    def scores_echo(self) -> bool:
        """Whether the log-probabilities of an echoed prompt are wanted."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def num_alternatives(self) -> int | None:
        """How many alternatives the prompt's tokens are scored with; None if they are not. An echo of which nothing
        follows is scored, as it is what the engine can do without generating."""
        only_echoes = bool(self.echo) and self.max_tokens == 0
        wanted = [self.prompt_logprobs, self.logprobs if self.scores_echo else None, 0 if only_echoes else None]
        return max((number for number in wanted if number is not None), default=None)


def prepare(service: Service, body: bytes, caller: Caller) -> Prepared:
    fields = decode_body(body, CompletionRequest)
    model = service.check_model(fields.model)
    check_prompt_logprobs(fields)
    num_generated = fields.num_generated
    prompts = token_prompts(service, fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
    service.check_choices(len(prompts) * num_generated)
    requests: list[GenerationRequest] = []
    completion_id = new_id("cmpl")
    for prompt in prompts:
        asked = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        allowed = service.tokens_left(len(prompt), asked, field="max_tokens")
        requests += generation_requests(
            fields,
            caller,
            prompt,
            max_tokens=allowed,
            logprobs=0 if fields.logprobs is None and num_generated > fields.num_samples else fields.logprobs,
            adapter=service.adapter_of(model),
            num_samples=num_generated,
            prompt_logprobs=fields.num_alternatives,
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
        return service.tokenize(item, add_special_tokens=add_special_tokens)
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
        self._generated = fields.num_generated
        self._frame = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._prompts = prompts
        self._echoes = echoes
        self._offsets = [0] * (len(prompts) * self._samples)
        self._is_plain = not (self._shows_tokens or fields.usage_in_chunks)
        self._texts: dict[int, sse.TextEvent] = {}

    def event(self, item: ChoiceOutput, choices: list[Choice]) -> bytes:
        output, text = item.output, item.output.text
        if self._echoes[item.choice // self._samples] and choices[item.choice].begins_with(output):
            text = self._echoes[item.choice // self._samples] + text
        if not text and output.finish_reason is None and not self._shows_tokens:
            return b""
        if self._is_plain and output.finish_reason is None:
            return self._text_event(item.choice).with_text(text)
        rendered = self._choice(item.choice, text, output)
        rendered |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        return sse.event(self._chunk([rendered], choices))

    def closing(self, choices: list[Choice]) -> bytes:
        if not self._fields.usage_at_end:
            return sse.DONE
        return sse.event(self._frame | {"choices": [], "usage": usage(choices, self._samples)}) + sse.DONE

    def failure(self, error: APIError) -> bytes:
        return b"data: " + error.body() + b"\n\n" + sse.DONE

    def body(self, choices: list[Choice]) -> bytes:
        kept = best(choices, self._generated, self._samples)
        rendered = [self._whole_choice(index, choice) for index, choice in enumerate(kept)]
        return msgspec.json.encode(self._frame | {"choices": rendered, "usage": usage(choices, self._generated)})

    @property
    def _shows_tokens(self) -> bool:
        return self._fields.logprobs is not None or bool(self._fields.return_token_ids)

    def _text_event(self, index: int) -> sse.TextEvent:
        """What a choice's text is sent in while nothing else is to be told."""
        if index not in self._texts:
            rendered = {"index": index, "logprobs": None, "finish_reason": None, "stop_reason": None}
            self._texts[index] = sse.TextEvent(lambda text: sse.event(self._chunk([rendered | {"text": text}], [])))
        return self._texts[index]

    def _chunk(self, rendered: list[dict[str, Any]], choices: list[Choice]) -> dict[str, Any]:
        chunk = self._frame | {"choices": rendered}
        if self._fields.usage_in_chunks:
            chunk["usage"] = usage(choices, self._samples)
        elif self._fields.usage_at_end:
            chunk["usage"] = None
        return chunk

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = self._echoes[index // self._samples] + choice.text
        rendered = self._choice(index, text, choice)
        if self._fields.prompt_logprobs is not None:
            rendered["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self._token)
        return rendered | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _choice(self, index: int, text: str, part: Choice | RequestOutput) -> dict[str, Any]:
        """What an event's output or a whole choice has in common."""
        prompt = self._prompts[index // self._samples]
        rendered: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self._fields.logprobs is not None:
            first = self._offsets[index] == 0
            echoed = self._echoed(prompt, part.prompt_logprobs) if first and self._fields.scores_echo else []
            rendered["logprobs"] = self._logprobs(index, [*echoed, *part.logprobs])
        if self._fields.return_token_ids:
            rendered |= {"prompt_token_ids": prompt, "token_ids": part.token_ids}
        return rendered

    def _echoed(self, prompt: Sequence[int], scores: Sequence[TokenLogprob]) -> list[TokenLogprob | int]:
        """The prompt's tokens as `_logprobs` takes them: nothing tells how likely the first one was."""
        wanted = self._fields.logprobs or 0
        return [prompt[0], *(replace(score, top=score.top[:wanted]) for score in scores)]

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob | int]) -> dict[str, Any]:
        """OpenAI's columns; an entry that is a token id has no log-probability."""
        tokens = [self._token(entry if isinstance(entry, int) else entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if isinstance(entry, int) else entry.logprob for entry in entries],
            "top_logprobs": [None if isinstance(entry, int) else self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Text to log-probability. Of tokens that look alike (parts of characters do) the likeliest stands for all."""
        return {self._token(token): value for token, value in reversed(entry.top)}


def best(choices: Sequence[Choice], num_generated: int, num_wanted: int) -> list[Choice]:
    """Of every `num_generated` choices, which are one prompt's, the `num_wanted` likeliest a token, likeliest first."""
    if num_generated == num_wanted:
        return list(choices)
    groups = [choices[start : start + num_generated] for start in range(0, len(choices), num_generated)]
    return [choice for group in groups for choice in sorted(group, key=mean_logprob, reverse=True)[:num_wanted]]


def mean_logprob(choice: Choice) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))
