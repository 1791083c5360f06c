"""One connection to a worker: sends a request, hands the answer on as it arrives."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

import httptools

from caudex.gateway.http_messages import Header

_MAX_HEAD_BYTES = 262_144
"""A worker whose headers, or interim answers, go on for longer is taken to be broken."""


class ResponseSink(Protocol):
    """Who receives an answer. Exactly one of `ended` and `failed` is called, and it is the last call."""

    def head(self, status: int, headers: list[Header]) -> None: ...

    def data(self, data: bytes) -> None: ...

    def ended(self) -> None: ...

    def failed(self, why: str) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """Idle, or serving one exchange. After an exchange that ended cleanly it may serve another if `reusable`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseSink | None = None
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._head_is_over = False
        self._until_close = False
        self._bodiless = False
        self._keep_alive = False
        self.reusable = False
        self.was_reused = False
        """Whether this is not its first exchange: the worker may have been closing it just as the request was sent."""
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def exchange(self, request: bytes, sink: ResponseSink, *, bodiless: bool = False) -> None:
        """Sends a request; the sink gets the answer. `bodiless` for HEAD, whose length is of what is not sent."""
        self._sink = sink
        self._complete = self._keep_alive = self._head_is_over = False
        self._head_bytes = 0
        self._bodiless = bodiless
        self.reusable = False
        if self._transport is None or self._transport.is_closing():
            self._fail("the connection was closed")
            return
        self._transport.write(request)

    def close(self) -> None:
        """Ends the connection at once; a worker that is generating sees its client leave."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def set_reading(self, reading: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.reusable = False
        if self._sink is None:
            return
        if self._until_close and exc is None:
            self._finish()
        else:
            self._fail("the worker closed the connection" if exc is None else f"the connection broke: {exc}")

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            # Nothing was asked, so whatever this is, the connection is not to be trusted with another request.
            self.close()
            return
        try:
            self._parser.feed_data(data)
            self._head_bytes += 0 if self._head_is_over else len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                raise httptools.HttpParserError(f"its head is longer than {_MAX_HEAD_BYTES} bytes")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._hand_over()
            self._fail(f"the worker's answer is not HTTP: {error}")
            self.close()
            return
        self._hand_over()
        if self._complete:
            self.reusable = self._keep_alive and self.is_open
            self._finish()

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("it goes on behind the end of its answer")
        self._headers = []
        self._until_close = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._sink is None:
            return
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)
        self._until_close = not framed
        self._head_is_over = True
        self._sink.head(status, self._headers)
        if self._bodiless:
            self._complete = True

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()

    # Inside

    def _hand_over(self) -> None:
        """All the body bytes of one read go on together: one write to the client, not one a chunk."""
        pieces = self._pieces
        if not pieces:
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        if self._sink is not None:
            self._sink.data(data)

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.ended()

    def _fail(self, why: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.failed(why)
