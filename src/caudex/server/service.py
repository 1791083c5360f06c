"""What every path of the server works with: engine, settings, names, and the threads beside the loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from caudex.engine.types import ChatTemplateError, GenerationRequest
from caudex.server.errors import APIError, engine_dead
from caudex.server.generation import Generation, OutputBridge
from caudex.server.metrics import Metrics
from caudex.server.settings import ServerSettings

if TYPE_CHECKING:
    from caudex.engine.engine import Engine

Result = TypeVar("Result")

TEXT_THREADS = 2
"""Threads that parse and tokenise. The tokenizer lets go of the interpreter lock; more threads would only queue."""

CHARACTERS_A_TOKEN = 8
"""More than texts have on average, in any language."""


class Service:
    """One engine behind HTTP.

    Methods that parse, render or tokenise are called on a worker thread (`off_loop`) and are thread-safe.

    Raises:
        ValueError: a LoRA adapter has a name of the model itself.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        own_names = settings.served_model_names or (engine.model_name,)
        for name in own_names:
            if name in engine.config.lora_adapters:
                raise ValueError(
                    f"{name!r} is the model's own name and an adapter's: requests could ask for one of them only; "
                    "give the adapter another name"
                )
        self.model_names: tuple[str, ...] = (*own_names, *engine.config.lora_adapters)
        self.metrics = Metrics(engine, self.model_names[0], settings.metrics_prefix)
        self.started_at = int(time.time())
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="caudex-text")
        self._patient_thread = ThreadPoolExecutor(1, thread_name_prefix="caudex-count")
        self._bridge: OutputBridge | None = None

    def close(self) -> None:
        for threads in (self._threads, self._patient_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def off_loop(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run `function` on a worker thread, so that a long prompt does not hold up other requests' tokens."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def apart(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run `function` where it keeps nobody waiting but others of its kind: texts of any length are tokenised so."""
        return await asyncio.get_running_loop().run_in_executor(self._patient_thread, function, *args)

    def generation(self, requests: Sequence[GenerationRequest]) -> Generation:
        """The engine's work for one HTTP request, not yet submitted. Call on the event loop."""
        if self._bridge is None:
            self._bridge = OutputBridge(asyncio.get_running_loop())
            self.engine.after_outputs(self._bridge.flush)
        return Generation(self.engine, self._bridge, self.metrics, requests)

    def check_ready(self) -> None:
        """Raise if a new request cannot be taken: the engine has stopped (503), or the queue is full (429)."""
        if not self.engine.is_alive:
            raise engine_dead(self.engine.error)
        limit = self.settings.max_waiting
        if limit is None:
            return
        waiting = self.engine.stats().num_requests_waiting
        if waiting >= limit:
            raise APIError(f"{waiting} requests are waiting, and this server queues {limit}; try again", status=429)

    def check_model(self, name: str | None) -> str:
        """The name to answer under. A request without one gets the first served name.

        Raises:
            APIError: 404; no model of that name is served here.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise APIError(
                f"the model {name!r} does not exist; this server has {served}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def adapter_of(self, model: str) -> str | None:
        """The LoRA adapter that a served name stands for; None for the names of the model itself."""
        return model if model in self.engine.config.lora_adapters else None

    def check_choices(self, count: int) -> None:
        """Raise if one HTTP request asks for more choices than the server allows."""
        limit = self.settings.max_choices
        if count > limit:
            raise APIError(f"prompts times n comes to {count} choices; this server allows {limit} a request", param="n")

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Raises:
            APIError: 400; a beginning of `text` alone is longer than the context.
        """
        self._check_beginnings(text)
        return self.engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template.

        Raises:
            APIError: 400; as `chat_text` and `tokenize`.
        """
        return self.tokenize(self.chat_text(messages, tools, **options), add_special_tokens=False)

    def chat_text(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> str:
        """A conversation in the model's chat template.

        Raises:
            APIError: 400; there is no template, or it does not take these messages.
        """
        try:
            return self.engine.tokenizer.render_chat_text(messages, tools, **options)
        except ChatTemplateError as exc:
            raise APIError(str(exc), param="messages") from None

    def _check_beginnings(self, text: str) -> None:
        """Refuse a text far too long by its beginning: ten megabytes take a minute to tokenise, on one of few threads.

        Ever longer beginnings are tried, as there are texts of few tokens (spaces are), at a third of the cost of all.
        """
        context, length = self.engine.max_model_len, CHARACTERS_A_TOKEN * self.engine.max_model_len
        while length <= len(text) // 4:
            num_tokens = len(self.engine.tokenizer.encode(text[:length], add_special_tokens=False))
            if num_tokens > context:
                raise APIError(
                    f"this model's maximum context length is {context} tokens, and the first {length} of the prompt's "
                    f"{len(text)} characters alone have {num_tokens}; shorten the prompt",
                    param="prompt",
                    code="context_length_exceeded",
                )
            length *= 4

    def tokens_left(self, num_prompt_tokens: int, max_tokens: int | None, *, field: str) -> int:
        """How many tokens a request may generate: `max_tokens`, or all that the context has room for.

        Raises:
            APIError: 400; the prompt is empty, or prompt and answer do not fit the context. Says all lengths.
        """
        context = self.engine.max_model_len
        room = context - num_prompt_tokens
        if num_prompt_tokens == 0:
            raise APIError("the prompt is empty; at least one token is needed", param="prompt")
        if room < 1:
            raise APIError(
                f"this model's maximum context length is {context} tokens, and the prompt has {num_prompt_tokens}; "
                "shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        if max_tokens is None:
            return room
        if max_tokens > room:
            raise APIError(
                f"this model's maximum context length is {context} tokens, and {num_prompt_tokens + max_tokens} were "
                f"asked for: {num_prompt_tokens} in the prompt and {max_tokens} by {field}; lower one of them",
                param=field,
                code="context_length_exceeded",
            )
        return max_tokens


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
