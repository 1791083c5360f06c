"""One request at one worker, from sending it to the last byte for the client."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from caudex.gateway.client_connection import ClientConnection
from caudex.gateway.http_messages import HOP_BY_HOP, Header, error_body
from caudex.gateway.settings import GatewaySettings
from caudex.gateway.upstream_connection import UpstreamConnection
from caudex.gateway.worker import Worker

RETRY_STATUSES = frozenset({429, 500, 502, 503, 504})
"""What another worker may well answer better."""

_MAX_BUFFERED = 1_048_576
"""An answer that is no stream is held back up to this size, so that a worker dying within it costs a retry only."""

_CACHED_TOKENS = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens|cache_n)"\s*:\s*(\d+)')
_PROMPT_TOKENS = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d+)')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,200})"')


class Outcome(Enum):
    DONE = "done"
    """The client has the worker's whole answer."""
    RETRY = "retry"
    """The client has nothing yet."""
    BROKEN = "broken"
    """The client has a part, and was told that there is no more."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the worker says about its cache."""

    prompt_tokens: int
    cached_tokens: int


def read_usage(data: bytes) -> Usage | None:
    """What a piece of an answer says, in the words of any of the engines; None if nothing."""
    cached, prompt = _CACHED_TOKENS.search(data), _PROMPT_TOKENS.search(data)
    return None if cached is None or prompt is None else Usage(int(prompt[1]), int(cached[1]))


class Attempt:
    """Relays one answer. Implements `ResponseSink` and `Outstanding`.

    A compressed stream, which no worker was asked for, is passed on as it is.

    An event stream goes to the client as it arrives, byte for byte, but in whole events: a worker that dies within one
    leaves no half of it behind, and the error event that then ends the stream can be read. The head is held back until
    there is a first event, so until then another worker may still answer.
    """

    __slots__ = (
        "_blocked_since",
        "_client",
        "_connection",
        "_headers",
        "_held",
        "_hold_bytes",
        "_is_stream",
        "_last_byte",
        "_may_retry",
        "_on_first_token",
        "_path",
        "_settings",
        "_worker",
        "first_byte_at",
        "outcome",
        "reply_headers",
        "response_id",
        "said_all",
        "sent_at",
        "status",
        "usage",
        "was_stale",
        "why",
    )

    def __init__(
        self,
        worker: Worker,
        connection: UpstreamConnection,
        client: ClientConnection,
        settings: GatewaySettings,
        *,
        on_first_token: Callable[[], None],
        reply_headers: list[Header],
        may_retry: bool,
        path: bytes,
    ) -> None:
        self._worker = worker
        self._connection = connection
        self._client = client
        self._settings = settings
        self._on_first_token = on_first_token
        self._may_retry = may_retry
        self._path = path
        self._held = b""
        self._headers: list[Header] = []
        self._is_stream = False
        self._hold_bytes = _MAX_BUFFERED
        self._blocked_since: float | None = None
        self.reply_headers = reply_headers
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.sent_at = self._last_byte = time.monotonic()
        self.first_byte_at: float | None = None
        self.status = 0
        self.was_stale = False
        self.said_all = False
        self.response_id: str | None = None
        self.usage: Usage | None = None
        self.why = ""

    async def run(self, request: bytes, *, bodiless: bool) -> Outcome:
        """Sends the request and returns when all is said; a client that leaves cancels it and the worker's work."""
        worker, connection = self._worker, self._connection
        worker.outstanding.add(self)
        self._client.on_writable = self._client_reads
        try:
            connection.exchange(request, self, bodiless=bodiless)
            return await self.outcome
        finally:
            worker.outstanding.discard(self)
            self._client.on_writable = None
            worker.pool.give_back(connection, time.monotonic())

    def ending(self) -> Outcome | None:
        """How it ended, where the client's connection was closed before `run` could say so: by the client, who had all
        that it waited for, or here, since a body with a length would not reach it. None if the client just left."""
        if self.outcome.done() and not self.outcome.cancelled():
            return self.outcome.result()
        return Outcome.DONE if self.said_all else None

    # ResponseSink

    def head(self, status: int, headers: list[Header]) -> None:
        if status in RETRY_STATUSES and self._may_retry:
            self._settle(Outcome.RETRY, f"it answered {status}")
            return
        self.status = status
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        encoded = any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers)
        self._is_stream = content_type.startswith(b"text/event-stream") and not encoded
        if encoded and content_type.startswith(b"text/event-stream"):
            self._hold_bytes = 0
        self._headers = [
            header
            for header in headers
            if header[0] not in HOP_BY_HOP and not (self._is_stream and header[0] == b"content-length")
        ]
        self._headers += self.reply_headers

    def data(self, data: bytes) -> None:
        if self.outcome.done():
            return
        self._last_byte = self._worker.last_heard = time.monotonic()
        if b"cache" in data and self.status == 200:
            self.usage = read_usage(data) or self.usage
        if self._path == b"/v1/responses" and self.response_id is None and (found := _RESPONSE_ID.search(data)):
            self.response_id = found[1].decode("latin-1")
        if self._is_stream:
            self._relay_events(data)
        elif self._client.response_started:
            self._client.write(data)
        else:
            self._held += data
            if len(self._held) > self._hold_bytes:
                self._release(self._held)
                self._held = b""

    def ended(self) -> None:
        if self.outcome.done():
            return
        if self._client.response_started:
            self._client.end_response(self._held)
        else:
            self._note_first_byte()
            self._client.start_response(self.status, self._sized(self._held), self._held)
            self._client.end_response()
        self._settle(Outcome.DONE)

    def failed(self, why: str) -> None:
        if self.outcome.done():
            return
        if not self._client.response_started:
            self.was_stale = self.status == 0 and self._connection.was_reused
            self._settle(Outcome.RETRY, why)
        elif self._is_stream:
            self._client.end_response(self._error_event(why))
            self._settle(Outcome.BROKEN, why)
        else:
            self._client.abort()
            self._settle(Outcome.BROKEN, why)

    # Outstanding

    def abandon(self, why: str) -> None:
        self._connection.close()
        self.failed(why)

    def check_deadline(self, now: float) -> None:
        if self._blocked_since is not None:
            if now - self._blocked_since > self._settings.stream_idle_timeout:
                self._client.abort()
            return
        started = self._client.response_started
        limit = self._settings.stream_idle_timeout if started else self._settings.first_byte_timeout
        if now - self._last_byte > limit:
            self.abandon(f"it sent nothing for {limit:g} s")

    # Inside

    def _client_reads(self, reads: bool) -> None:
        """While the client does not keep up nothing is read from the worker, whose silence then says nothing."""
        now = time.monotonic()
        self._blocked_since = None if reads else now
        self._last_byte = now
        self._connection.set_reading(reads)

    def _relay_events(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4 if b"\r" in data else 0)
        if end < 2:
            end = 0
        if end == 0 and len(data) > _MAX_BUFFERED:
            end = len(data)
        whole = data if end == len(data) else data[:end]
        self._held = b"" if end == len(data) else data[end:]
        if not whole:
            return
        # Many clients close at this event, without waiting for the end of the body behind it.
        self.said_all = whole.endswith(b"data: [DONE]\n\n")
        if self._client.response_started:
            self._client.write(whole)
        else:
            self._release(whole)

    def _release(self, data: bytes) -> None:
        self._note_first_byte()
        if self._is_stream and self.status == 200:
            self._on_first_token()
        self._client.start_response(self.status, self._headers, data)

    def _note_first_byte(self) -> None:
        if self.first_byte_at is None:
            self.first_byte_at = time.monotonic()

    def _sized(self, body: bytes) -> list[Header]:
        """A whole answer has a length, however the worker framed it; HEAD keeps the length of what it stands for."""
        if any(name == b"content-length" for name, _ in self._headers):
            return self._headers
        return [*self._headers, (b"content-length", b"%d" % len(body))]

    def _error_event(self, why: str) -> bytes:
        body = error_body(f"the worker failed while it answered: {why}", "upstream_error", "worker_failed")
        if self._path == b"/v1/messages":
            return b'event: error\ndata: {"type":"error",' + body[1:] + b"\n\n"
        return b"data: " + body + b"\n\n"

    def _settle(self, outcome: Outcome, why: str = "") -> None:
        self.why = why
        if not self.outcome.done():
            self.outcome.set_result(outcome)
