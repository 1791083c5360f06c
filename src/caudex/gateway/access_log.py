"""One line of JSON a request."""

from __future__ import annotations

from typing import TextIO

import msgspec


class AccessRecord(msgspec.Struct, omit_defaults=True):
    time: float
    request_id: str
    peer: str
    method: str
    path: str
    status: int = 0
    tenant: str = ""
    model: str = ""
    worker: str = ""
    reason: str = ""
    attempts: int = 0
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    reported_cached_tokens: int | None = None
    first_byte_seconds: float | None = None
    seconds: float = 0.0
    bytes_sent: int = 0
    error: str = ""


class AccessLog:
    """Buffered by the stream; `flush` is called once a second."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, record: AccessRecord) -> None:
        self._stream.write(msgspec.json.encode(record).decode() + "\n")

    def flush(self) -> None:
        self._stream.flush()
