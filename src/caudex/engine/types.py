"""What passes between the engine and whoever drives it: requests in, outputs and figures out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, TypeAlias

import msgspec

from caudex.cache.namespace import ADAPTER_SEPARATOR
from caudex.tiers.tier_stats import TierStats

GrammarKind: TypeAlias = Literal["json_schema", "regex", "choice", "lark"]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
"""The most alternatives a token that `logprobs` may ask for."""

MAX_CACHE_TTL = 3600.0
"""The longest that a request may ask its blocks to be kept, in seconds."""

MAX_STOPS = 64
"""The most stop strings of a request. All of them are looked for at every token."""

MAX_STOP_LENGTH = 1024
"""The longest stop string, in characters; up to as many may be held back from the owner until they are known not to be
one."""

MAX_GRAMMAR_LENGTH = 2**16
"""The longest text of a grammar, in characters: what takes seconds to compile, or a step to follow, is longer."""

MAX_PRIORITY = 2**31 - 1
"""Priorities lie between this and its negative."""


class ChatTemplateError(ValueError):
    """A conversation that the model's chat template cannot render; the message says why."""


class InvalidRequestError(ValueError):
    """A request that cannot be served; `field` is what is wrong with it: `prompt`, `grammar`, `logit_bias` ..."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class EngineDeadError(RuntimeError):
    """The engine's thread has ended, by `shutdown` or by an error; it takes no more requests."""


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """What an output must look like.

    `text` is a JSON schema (`json_schema`), a regular expression (`regex`), a JSON list of strings of which the output
    is one (`choice`), or a grammar in llguidance's variant of Lark (`lark`). At most `MAX_GRAMMAR_LENGTH` characters.
    `origin` is the field that an `InvalidRequestError` is to name.
    """

    kind: GrammarKind
    text: str
    origin: str = field(default="grammar", compare=False)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a request ends.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch those filters off. A `seed` makes a request's samples
    the same whatever else is in the batch. `stop` strings are cut from the text; `stop_token_ids` and, unless
    `ignore_eos`, the model's end tokens end the request too. `logprobs` asks for that many top alternatives a token;
    they are of the model's own distribution, before temperature, penalties and filters. `prompt_logprobs` asks for the
    same of the prompt; what an earlier request has scored of it is not computed again. With `max_tokens` 0 nothing is
    generated, only scored. Before `min_tokens` tokens nothing but a finished grammar ends a text.

    `presence_penalty` and `frequency_penalty` lower the logits of what was generated (once, or by count);
    `repetition_penalty` divides positive and multiplies negative logits of all that prompt and output hold.
    `logit_bias` adds to the logits of single token ids. With a `grammar`, only what it allows can be chosen. Filters
    apply in the order temperature, top-k, top-p, min-p.

    Raises:
        ValueError: a value is outside its range; the message names the value and the range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: OutputGrammar | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0

    def __post_init__(self) -> None:
        check_range("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, None)
        check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_range("temperature", self.temperature, 0.0, 100.0)
        check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_range("top_k", self.top_k, 0, None)
        check_range("min_p", self.min_p, 0.0, 1.0)
        if self.logprobs is not None:
            check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        for token_id, bias in self.logit_bias.items():
            check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        _check_stops(self.stop)


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop holds {len(stops)} strings; expected at most {MAX_STOPS}")
    for text in stops:
        if not text:
            raise ValueError("stop holds an empty string, which would end every text before it begins")
        if len(text) > MAX_STOP_LENGTH:
            raise ValueError(f"stop holds a string of {len(text)} characters; expected at most {MAX_STOP_LENGTH}")


def check_range(name: str, value: float, low: float, high: float | None, *, low_open: bool = False) -> None:
    """Raise a ValueError that names `value` and the range unless it is a finite number inside it."""
    above = value > low if low_open else value >= low
    if above and (high is None or value <= high):
        return
    opening = "above" if low_open else "at least"
    closing = "" if high is None else f" and at most {high:g}"
    raise ValueError(f"{name} is {value!r}; expected a number {opening} {low:g}{closing}")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    `namespace` keeps its cached blocks from every other namespace's requests; `tenant` does so within a namespace as
    far as the engine's `sharing` says. A lower `priority` is served sooner. With a `cache_ttl` above 0 the request's
    blocks stay cached for that many seconds after it ends, within a budget, or until the next request of its
    `session_id` ends. `adapter` names one of the engine's LoRA adapters; each has a cache of its own.

    `sample_of` is the id of a request with the same prompt, namespace, tenant and adapter: this one is another sample
    of it, and branches off where that prompt ends, if it has not been computed yet.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    priority: int = 0
    tenant: str = ""
    session_id: str | None = None
    cache_ttl: float = 0.0
    adapter: str | None = None
    sample_of: str | None = None

    def __post_init__(self) -> None:
        check_range("cache_ttl", self.cache_ttl, 0.0, MAX_CACHE_TTL)
        check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name in ("namespace", "tenant"):
            value: str = getattr(self, name)
            if "\0" in value or ADAPTER_SEPARATOR in value:
                raise ValueError(f"{name} is {value!r}; it cannot hold the control characters 0 and 31")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, its rank (1 is the likeliest), and the best alternatives as (id, log-probability)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """What one engine step added to a request. `text` is the new text only; the last output has a `finish_reason`.

    The first output has the `prompt_logprobs` that were asked for, one entry for each prompt token but the first. An
    `error` that the request itself has caused names the field in `error_field`.

    A struct of msgspec, since one is made a token: a frozen dataclass with as many fields takes ten times as long.
    """

    request_id: str
    token_ids: list[int]
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    error_field: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether this ends a request that was given up or went wrong."""
        return self.finish_reason == "error" or self.finish_reason == "abort"

    @staticmethod
    def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
        """What one request's `outputs`, in order and at least one, have added together."""
        if len(outputs) == 1:
            return outputs[0]
        return msgspec.structs.replace(
            outputs[-1],
            token_ids=list(chain.from_iterable(output.token_ids for output in outputs)),
            text="".join(output.text for output in outputs),
            logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
            prompt_logprobs=tuple(chain.from_iterable(output.prompt_logprobs for output in outputs)),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request as a whole. Of `num_prompt_tokens`, `num_cached_tokens` were found in the cache."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class GenerationError(RuntimeError):
    """A request that ended by an error or an abort instead of a text."""


OutputCallback: TypeAlias = Callable[[RequestOutput], None]
"""Called on the engine's thread, once a step that touched the request; it must return at once and never raise."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start and gauges of now. Tokens and blocks are counts; the sums close (design.md, Accounting).

    `tier_queries` are the prompt tokens that the tiers were asked for, `tier_hits` those that they gave, which are
    among the `prefix_cache_hits` too.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    preemptions: int
    requests_finished: dict[FinishReason, int]
    kv_tiers: tuple[TierStats, ...] = ()
    tier_queries: int = 0
    tier_hits: int = 0
