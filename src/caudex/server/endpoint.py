"""One HTTP path that generates text, whatever the protocol: read, prepare, submit, then stream or collect.

        body ──> prepare ──────────> Prepared ──> Generation ──┬──> events, as the engine makes them
       (loop)    (worker thread)                  (the engine) └──> one JSON, when all has been made

What a protocol's requests and answers look like is in its own module: a `prepare` function and a `Renderer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from caudex.engine.types import FinishReason, GenerationRequest, RequestOutput, TokenLogprob
from caudex.server.errors import APIError
from caudex.server.generation import ChoiceOutput
from caudex.server.service import Service
from caudex.server.settings import ServerSettings

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

LINGER_SECONDS = 2.0
"""How long a client that sends too much may go on before it is answered."""


@dataclass(slots=True)
class Choice:
    """All the outputs of one choice so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason

    def begins_with(self, output: RequestOutput) -> bool:
        """Whether `output`, which was added last, has the first tokens."""
        return len(self.token_ids) == len(output.token_ids)


class Renderer(Protocol):
    """Writes a protocol's answer. Sees every output once, in order; `choices` is all there is so far, it included."""

    def event(self, item: ChoiceOutput, choices: list[Choice]) -> bytes:
        """The server-sent events that one output gives rise to; may be empty."""

    def closing(self, choices: list[Choice]) -> bytes:
        """The events that end a stream."""

    def failure(self, error: APIError) -> bytes:
        """The events that end a stream which failed after it had begun."""

    def body(self, choices: list[Choice]) -> bytes:
        """The whole answer as one JSON."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been understood: what the engine is to do (choice i is requests[i]) and how to tell it."""

    requests: list[GenerationRequest]
    renderer: Renderer
    stream: bool


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the tenant that the API key stands for, and the session that the header names."""

    tenant: str
    session_id: str | None


Prepare: TypeAlias = Callable[[Service, bytes, Caller], Prepared]
"""Parses and tokenises a body on a worker thread; raises APIError for what cannot be answered."""


class GenerationEndpoint:
    """ASGI application for one path. A client that leaves is noticed at once, and its engine requests are aborted."""

    def __init__(self, service: Service, prepare: Prepare) -> None:
        self._service = service
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        body = await read_body(headers, receive, self._service.settings)
        if body is None:
            return
        caller = Caller(scope.get("tenant", ""), headers.get("x-session-id"))
        await while_connected(self._answer(body, caller, send), receive)

    async def _answer(self, body: bytes, caller: Caller, send: Send) -> None:
        self._service.check_ready()
        prepared = await self._service.off_loop(self._prepare, self._service, body, caller)
        async with self._service.generation(prepared.requests) as generation:
            outputs = generation.outputs()
            if prepared.stream:
                await stream(outputs, prepared, send)
            else:
                await collect(outputs, prepared, send)


async def stream(outputs: AsyncIterator[list[ChoiceOutput]], prepared: Prepared, send: Send) -> None:
    """Send events as outputs come, those of a step in one piece. The status waits for the first output, so that early
    failures keep their own."""
    renderer, choices, started = prepared.renderer, [Choice() for _ in prepared.requests], False
    try:
        async for items in outputs:
            events = b""
            for item in items:
                choices[item.choice].add(item.output)
                events += renderer.event(item, choices)
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                started = True
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        ending = renderer.closing(choices)
    except APIError as error:
        if not started:
            raise
        ending = renderer.failure(error)
    await send({"type": "http.response.body", "body": ending, "more_body": False})


async def collect(outputs: AsyncIterator[list[ChoiceOutput]], prepared: Prepared, send: Send) -> None:
    """Send one JSON when every choice has finished."""
    choices = [Choice() for _ in prepared.requests]
    async for items in outputs:
        for item in items:
            choices[item.choice].add(item.output)
    await send_json(send, prepared.renderer.body(choices))


async def send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def read_body(headers: Headers, receive: Receive, settings: ServerSettings) -> bytes | None:
    """The request's body, or None if the client left before it was whole.

    Raises:
        APIError: 413; the body is announced or found to be longer than `max_body_bytes`. No more than that is kept.
        APIError: 408; the client was silent for longer than `client_timeout`.
    """
    limit = settings.max_body_bytes
    announced = headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        if "expect" not in headers:
            await discard_rest(receive)
        raise body_too_large(limit)
    body = bytearray()
    while True:
        try:
            message = await asyncio.wait_for(receive(), settings.client_timeout)
        except TimeoutError:
            raise APIError("the rest of the request's body did not arrive in time", status=408) from None
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            body.clear()
            await discard_rest(receive)
            raise body_too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


async def discard_rest(receive: Receive) -> None:
    """Take what a client is still sending, for at most `LINGER_SECONDS`: closing a connection with bytes unread resets
    it, and the client would not see why it was refused."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body", False):
                pass


def body_too_large(limit: int) -> APIError:
    return APIError(f"the request body is larger than {limit} bytes, the most this server takes", status=413)


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work` to its end, or until the client disconnects, which cancels it where it stands."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        leaving.cancel()
        if working.cancel():
            await asyncio.wait((working,))


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
