"""HTTP/1.1 messages as bytes: heads to send, headers that must not be passed on, errors in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

Header = tuple[bytes, bytes]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that concern one connection only (RFC 9110, 7.6.1)."""

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


@dataclass(slots=True)
class HttpRequest:
    """A request that has been read whole. Header names are in lower case."""

    method: str
    target: bytes
    headers: list[Header]
    keep_alive: bool
    http_1_0: bool = False
    body: bytes = b""
    received_at: float = 0.0
    path: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.target.partition(b"?")[0]

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class HttpError(Exception):
    """An answer that the gateway gives itself."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after

    def headers(self) -> list[Header]:
        if self.retry_after is None:
            return []
        return [(b"retry-after", b"%d" % max(1, round(self.retry_after)))]


def error_body(message: str, kind: str, code: int | str) -> bytes:
    """An error as OpenAI's clients expect it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def status_line(status: int) -> bytes:
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def head(first_line: bytes, headers: list[Header]) -> bytes:
    return first_line + b"".join([b"%b: %b\r\n" % header for header in headers]) + b"\r\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; `data` must not be empty."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
