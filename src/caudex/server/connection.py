"""What a client may take: time and bytes for the head of a request, and time to read an answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 2**16
"""The most bytes of a request's line and headers."""

PROBES = 4


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which closes a connection whose next request's head does not arrive.

    A head has `client_timeout` seconds from its first byte, and from the start of the connection, and `MAX_HEAD` bytes;
    uvicorn waits for ever and keeps all that comes.
    """

    def __init__(self, *, client_timeout: float, **others: Any) -> None:
        super().__init__(**others)
        self._client_timeout = client_timeout
        self._head_size = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._head_size += len(data)
        super().data_received(data)
        if self._head_timer is None:
            self._head_size = 0
        elif self._head_size > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may be at most {MAX_HEAD} bytes long.")

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._client_timeout, self.transport.abort)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def bound_silence(listener: socket.socket, seconds: float) -> None:
    """Let the system end connections, of those that `listener` accepts, whose client takes nothing for that long.

    A client that stops reading, or is gone without a word, then counts as disconnected, and its requests are aborted.
    Where the system has no such limits (they are Linux's), such connections last.
    """
    whole = max(1, round(seconds))
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, whole * 1000)
    if hasattr(socket, "TCP_KEEPIDLE"):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, whole)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, whole // PROBES))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
