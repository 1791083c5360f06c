"""One client's connection: reads requests whole and within limits, writes responses."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from caudex.gateway.http_messages import (
    LAST_CHUNK,
    Header,
    HttpError,
    HttpRequest,
    chunk,
    error_body,
    head,
    status_line,
)

if TYPE_CHECKING:
    from caudex.gateway.settings import GatewaySettings


_MAX_PIPELINED = 16
"""Requests that a client may have sent ahead before its connection is read no further."""


class RequestHandler(Protocol):
    """Who answers requests and knows the connections."""

    settings: GatewaySettings
    connections: set[ClientConnection]
    closing: bool
    buffered_bytes: int
    """Bytes of bodies that all connections hold."""

    async def handle(self, request: HttpRequest, client: ClientConnection) -> None: ...

    def refused(self, status: int) -> None: ...


class ClientConnection(asyncio.Protocol):
    """Requests of one connection are answered one after another; reading pauses while one is being answered.

    A body is framed anew for the worker from what was read here, so what the client and a worker believe about where
    a message ends can never differ. The parser (llhttp, strict) refuses a message with both a length and chunks.
    `deadline` is the time by which the client must have done its part; a sweep closes what is beyond it.
    """

    def __init__(self, handler: RequestHandler, loop: asyncio.AbstractEventLoop) -> None:
        self._handler = handler
        self._settings = handler.settings
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._pending: deque[HttpRequest] = deque()
        self._task: asyncio.Task[None] | None = None
        self._current: HttpRequest | None = None
        self._current_bytes = 0
        self._refusal: HttpError | None = None
        self._idle = True
        self._has_asked = False
        self._start_message()
        self.deadline = time.monotonic() + self._settings.header_timeout
        self.peer: str = ""
        self.response_started = False
        self.bytes_written = 0
        self.on_writable: Callable[[bool], None] | None = None
        """Told False when the client does not keep up, True when it does again."""
        self._chunked = False
        self._close_after = False
        self._reading_paused = False
        self._buffered = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = peer[0] if isinstance(peer, tuple) else ""
        if self._handler.closing:
            self._refuse(HttpError(503, "the gateway is stopping", "overloaded_error", 1.0))
            return
        if len(self._handler.connections) >= self._settings.max_connections:
            self._refuse(HttpError(503, "the gateway has as many connections as it may", "overloaded_error", 1.0))
            return
        self._handler.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._handler.connections.discard(self)
        self._buffer(-self._buffered)
        self._transport = None
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self.on_writable is not None:
            self.on_writable(False)

    def resume_writing(self) -> None:
        if self.on_writable is not None:
            self.on_writable(True)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._transport is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, HttpError) else HttpError(400, f"malformed request: {error}"))
        else:
            self._watch_header(len(data))
        if self._task is None:
            self._answer_next()
        elif len(self._pending) >= _MAX_PIPELINED or self._buffered > self._settings.max_body_bytes:
            # Not sooner: while reading is paused nobody notices that the client has left.
            self._transport.pause_reading()
            self._reading_paused = True

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._start_message()
        self._idle = False
        self._has_asked = True
        self.deadline = time.monotonic() + self._settings.header_timeout

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            # A trailer. It is read and not passed on: what stands behind a body must not pass for a header.
            self._trailer_bytes += len(name) + len(value) + 4
            if self._trailer_bytes > self._settings.max_header_bytes:
                raise self._headers_too_large()
            return
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_body = True
        if self._parser.should_upgrade():
            raise HttpError(400, "this gateway does not change protocols")
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > self._settings.max_header_bytes:
            raise self._headers_too_large()
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._settings.max_body_bytes:
                raise self._body_too_large()
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise HttpError(400, "the only transfer encoding that this gateway reads is chunked")
        if self._parser.get_http_version() not in ("1.0", "1.1"):
            raise HttpError(400, "this gateway speaks HTTP/1.1 and HTTP/1.0")
        if any(name == b"expect" and value.lower() == b"100-continue" for name, value in self._headers):
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.deadline = time.monotonic() + self._settings.body_timeout

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self._settings.max_body_bytes:
            raise self._body_too_large()
        self._buffer(len(data))
        if self._handler.buffered_bytes > self._settings.max_buffered_bytes:
            raise HttpError(503, "the gateway holds as many bytes of requests as it may", "overloaded_error", 1.0)
        self._body.append(data)

    def on_message_complete(self) -> None:
        parser = self._parser
        request = HttpRequest(
            parser.get_method().decode("ascii"),
            self._target,
            self._headers,
            parser.should_keep_alive(),
            parser.get_http_version() == "1.0",
            self._body[0] if len(self._body) == 1 else b"".join(self._body),
            time.monotonic(),
        )
        self._pending.append(request)
        self._start_message()
        self._idle = True

    # Responding

    @property
    def connected(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def respond(
        self, status: int, body: bytes, content_type: bytes = b"application/json", extra: Sequence[Header] = ()
    ) -> None:
        """A whole response made here."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *extra]
        self.start_response(status, headers, body)
        self.end_response()

    def start_response(self, status: int, headers: list[Header], body: bytes) -> None:
        """The head of a response and the first of its body. Without a content-length the body is sent in chunks."""
        request = self._current
        self.response_started = True
        sized = any(name == b"content-length" for name, _ in headers)
        bodiless = request is not None and (request.method == "HEAD" or status in (204, 304))
        http_1_0 = request is not None and request.http_1_0
        self._chunked = not sized and not bodiless and not http_1_0
        self._close_after = (request is None or not request.keep_alive) or (http_1_0 and not sized)
        if self._chunked:
            headers = [*headers, (b"transfer-encoding", b"chunked")]
        headers = [*headers, (b"connection", b"close" if self._close_after else b"keep-alive")]
        self._write(head(status_line(status), headers) + (b"" if bodiless or not body else self._framed(body)))

    def write(self, data: bytes) -> None:
        """More of the body, in the order given."""
        if data:
            self._write(self._framed(data))

    def end_response(self, last: bytes = b"") -> None:
        """The end of the body, with the last of it."""
        tail = self._framed(last) if last else b""
        if self._chunked:
            tail += LAST_CHUNK
        if tail:
            self._write(tail)
        if self._close_after and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Cuts the connection; the only honest end of a body that has a length and will not reach it."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_idle(self, *, even_if_new: bool) -> None:
        """Closes a connection on which no request is under way; one on which there was none yet if told so, since its
        first may be on its way."""
        if self._task is None and self._idle and self._transport is not None and (self._has_asked or even_if_new):
            self._transport.close()

    def check_deadline(self, now: float) -> None:
        """Closes a connection whose client is too slow; says so if a request was under way."""
        if self._task is not None or now < self.deadline or self._transport is None:
            return
        if self._idle:
            self._transport.close()
        else:
            self._refuse(HttpError(408, "the request did not arrive in time", "timeout_error"))
            self._answer_next()

    # Inside

    def _start_message(self) -> None:
        self._target = b""
        self._headers: list[Header] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._header_bytes = self._trailer_bytes = 0
        self._in_body = False
        self._began_now = True

    def _watch_header(self, num_bytes: int) -> None:
        """Ends headers that do not end. The read in which they began is not counted: it may hold other messages too."""
        if not self._in_body and not self._began_now:
            self._header_bytes += num_bytes
            if self._header_bytes > self._settings.max_header_bytes:
                self._refuse(self._headers_too_large())
        self._began_now = False

    def _buffer(self, num_bytes: int) -> None:
        self._buffered += num_bytes
        self._handler.buffered_bytes += num_bytes

    def _framed(self, data: bytes) -> bytes:
        return chunk(data) if self._chunked else data

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self.bytes_written += len(data)
            self._transport.write(data)

    def _headers_too_large(self) -> HttpError:
        return HttpError(431, f"the headers are longer than {self._settings.max_header_bytes} bytes")

    def _body_too_large(self) -> HttpError:
        return HttpError(413, f"the body is longer than {self._settings.max_body_bytes} bytes")

    def _refuse(self, error: HttpError) -> None:
        """No further request is read; the answer follows those to the requests read before."""
        self._refusal = error
        if self._task is None and not self._pending:
            self._send_refusal()

    def _send_refusal(self) -> None:
        error = self._refusal
        if error is None or self._transport is None or self._transport.is_closing():
            return
        self._current = None
        self._handler.refused(error.status)
        self.respond(error.status, error_body(str(error), error.kind, error.status), extra=error.headers())

    def _answer_next(self) -> None:
        if not self._pending:
            if self._refusal is not None:
                self._send_refusal()
            return
        request = self._current = self._pending.popleft()
        self._current_bytes = len(request.body)
        self.response_started = False
        self._task = self._loop.create_task(self._handler.handle(request, self))
        self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self.on_writable = None
        if self._transport is not None:
            self._buffer(-self._current_bytes)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler({"message": "a request handler failed", "exception": error})
            self.abort()
        if self._transport is None or self._transport.is_closing():
            return
        if self._handler.closing and not self._pending:
            self._transport.close()
            return
        if self._reading_paused and len(self._pending) < _MAX_PIPELINED:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._idle:
            self.deadline = time.monotonic() + self._settings.idle_timeout
        self._answer_next()
