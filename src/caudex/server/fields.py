"""The request fields that every generating path shares, and what the engine is told about them."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from caudex.engine.types import GenerationRequest, OutputGrammar, SamplingParams
from caudex.server.endpoint import Caller
from caudex.server.errors import APIError
from caudex.server.formats import ResponseFormat, StructuredOutputs, output_grammar

Body = TypeVar("Body", bound=msgspec.Struct)

SALT = re.compile(r"[^@/\\\x00]{1,128}")
"""What a `cache_salt` may be: the rule of vLLM, so that a salt that works there works here."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "chat_template": (None,),
    "use_beam_search": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "modalities": (None, ["text"]),
    "prompt_embeds": (None,),
    "repetition_detection": (None,),
    "return_tokens_as_token_ids": (None, False),
    "skip_special_tokens": (None, True),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
    "web_search_options": (None,),
}
"""Fields of OpenAI's and vLLM's servers that this one does not act on, and the values with which they ask for nothing.
Any other value is refused: an answer that ignores a setting is a wrong answer."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields common to chat and plain completions; OpenAI's, then the extras that vLLM made customary.

    Null means the same as absent. Unknown fields are ignored, as OpenAI-compatible servers do.
    """

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    repetition_penalty: float | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    include_stop_str_in_output: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    modalities: Any = None
    prompt_embeds: Any = None
    repetition_detection: Any = None
    return_tokens_as_token_ids: Any = None
    skip_special_tokens: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    web_search_options: Any = None
    return_token_ids: bool | None = False
    cache_salt: str | None = None
    session_id: str | None = None
    cache_ttl: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = 0

    @property
    def num_samples(self) -> int:
        """Choices a prompt; `n` checked."""
        if self.n is not None and self.n < 1:
            raise APIError(f"n is {self.n}; expected at least 1", param="n")
        return self.n or 1

    @property
    def usage_at_end(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        return self.usage_at_end and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def decode_body(body: bytes, shape: type[Body]) -> Body:
    """Parse a request body into its shape.

    Raises:
        APIError: 400; not JSON, or a field of the wrong type, which `param` names.
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as exc:
        place = re.search(r"`\$\.?([^`]*)`", str(exc))
        raise APIError(str(exc), param=place.group(1) or None if place else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise APIError(f"the request body is not valid JSON: {exc}", code="invalid_json") from None


def refuse_unsupported(fields: GenerationFields) -> None:
    """Raise if a field the engine does not act on asks for something."""
    for name, neutral in NEUTRAL.items():
        value = getattr(fields, name, None)
        if value not in neutral:
            remedy = "use structured_outputs" if name.startswith("guided_") else "leave it out"
            raise APIError(f"{name} is {value!r:.80}, which this server does not support; {remedy}", param=name)


def check_prompt_logprobs(fields: GenerationFields) -> None:
    """Raise if log-probabilities of the prompt are to be streamed: they belong to the whole answer."""
    if fields.prompt_logprobs is not None and fields.stream:
        raise APIError(
            f"prompt_logprobs is {fields.prompt_logprobs}, which a streamed answer has no place for; use echo with "
            "logprobs, or do not stream",
            param="prompt_logprobs",
        )


def namespace_of(fields: GenerationFields) -> str:
    """The cache namespace a request's salt puts it in; requests of other namespaces never share its blocks."""
    salt = fields.cache_salt
    if salt is None:
        return ""
    if not SALT.fullmatch(salt):
        raise APIError(
            f"cache_salt is {salt[:140]!r}; expected 1 to 128 characters, none of them @ / \\ or NUL",
            param="cache_salt",
        )
    return salt


def generation_requests(
    fields: GenerationFields,
    caller: Caller,
    prompt: list[int],
    *,
    max_tokens: int,
    logprobs: int | None,
    adapter: str | None,
    num_samples: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: OutputGrammar | None = None,
) -> list[GenerationRequest]:
    """One engine request a sample of `prompt`: the first computes it, and the others branch off where it ends.

    Args:
        num_samples: as many as `n` says where it is None.
        grammar: what the answer must look like besides what `fields` say of it.

    Raises:
        APIError: 400; a value is outside its range, and the message and `param` name it.
    """
    refuse_unsupported(fields)
    session = fields.session_id or caller.session_id
    ids = [uuid.uuid4().hex for _ in range(num_samples or fields.num_samples)]
    try:
        sampling = sampling_params(fields, max_tokens, logprobs, prompt_logprobs, grammar)
        return [
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + choice),
                namespace=namespace_of(fields),
                priority=fields.priority or 0,
                tenant=caller.tenant,
                session_id=f"{caller.tenant}/{session}" if session else None,
                cache_ttl=fields.cache_ttl or 0.0,
                adapter=adapter,
                sample_of=ids[0] if choice else None,
            )
            for choice, request_id in enumerate(ids)
        ]
    except ValueError as exc:
        raise APIError(str(exc), param=re.split(r"[ \[]", str(exc), maxsplit=1)[0]) from None


def sampling_params(
    fields: GenerationFields,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: OutputGrammar | None,
) -> SamplingParams:
    """The engine's parameters for the first choice; the others of a seeded request get the next seeds, so they differ.

    Raises:
        ValueError: a value is outside its range; the message begins with its name.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=0 if fields.top_k in (None, -1) else fields.top_k,
        min_p=fields.min_p or 0.0,
        seed=fields.seed,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=fields.logit_bias or {},
        grammar=output_grammar(fields.response_format, fields.structured_outputs, grammar),
        prompt_logprobs=prompt_logprobs,
        min_tokens=fields.min_tokens or 0,
    )
