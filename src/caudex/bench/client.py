"""A streaming client that measures: one request in, one Record out. Standard library only, so that it is light enough
to run beside the server it measures."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec

MAX_LINE = 2**24
DOCUMENT_TIMEOUT = 30.0


class ServerError(Exception):
    """The server refused a request or broke off its answer; the message has its status and words."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server. `strict` leaves out the fields that are not OpenAI's own (`ignore_eos`)."""

    url: str
    model: str
    api_key: str | None = None
    strict: bool = False
    timeout: float = 600.0


@dataclass(slots=True)
class Record:
    """What one request took. Times in seconds; token counts are the server's own, None where it tells none.

    `ttft` runs from before the connection to the first piece of text, `gaps` are the times between pieces.
    `first` says that this scene had not sent this request's prefix before.
    """

    first: bool
    ttft: float = 0.0
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None


async def measure(endpoint: Endpoint, path: str, body: dict[str, Any], *, first: bool) -> tuple[Record, str]:
    """Send one streaming request; its measurements and its text.

    A refusal or a broken answer is a Record with an `error`, since one failed request should not end a benchmark.
    """
    record, pieces, times = Record(first=first), [], []
    body = body | {"model": endpoint.model, "stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    try:
        async with asyncio.timeout(endpoint.timeout), aclosing(events(endpoint, path, body)) as stream:
            async for at, chunk in stream:
                read_usage(record, chunk)
                for text in texts(chunk):
                    pieces.append(text)
                    times.append(at)
    except (ServerError, OSError, TimeoutError, EOFError, msgspec.DecodeError) as exc:
        record.error = str(exc) or type(exc).__name__
    record.total = time.perf_counter() - started
    record.ttft = times[0] - started if times else record.total
    record.gaps = [later - earlier for earlier, later in pairwise(times)]
    return record, "".join(pieces)


def texts(chunk: dict[str, Any]) -> list[str]:
    """The new text in a chunk of either protocol; reasoning counts, since it is generated too."""
    found = []
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        if text:
            found.append(text)
    return found


def read_usage(record: Record, chunk: dict[str, Any]) -> None:
    usage = chunk.get("usage")
    if not usage:
        return
    record.prompt_tokens = usage.get("prompt_tokens")
    record.completion_tokens = usage.get("completion_tokens")
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


async def events(
    endpoint: Endpoint, path: str, body: dict[str, Any]
) -> AsyncGenerator[tuple[float, dict[str, Any]], None]:
    """POST `body`; yield each server-sent event with the time its bytes arrived, until `[DONE]`.

    Raises:
        ServerError: a status other than 200, or an event with an `error`.
    """
    reader, writer = await connect(endpoint)
    try:
        writer.write(request_bytes(endpoint, "POST", path, msgspec.json.encode(body)))
        await writer.drain()
        status, headers = await read_head(reader)
        if status != 200:
            raise ServerError(f"status {status}: {(await read_body(reader, headers))[:500].decode(errors='replace')}")
        async for at, line in lines(reader, headers):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            chunk = msgspec.json.decode(data, type=dict[str, Any])
            if chunk.get("error"):
                raise ServerError(f"error in the stream: {chunk['error']}")
            yield at, chunk
        raise ServerError("the stream ended without [DONE]")
    finally:
        writer.close()


async def get_json(endpoint: Endpoint, path: str) -> Any:
    """GET a JSON document; raises as `get`."""
    return msgspec.json.decode(await get(endpoint, path))


async def get(endpoint: Endpoint, path: str) -> bytes:
    """GET a document.

    Raises:
        ServerError: a status other than 200, or no whole answer within `DOCUMENT_TIMEOUT` seconds.
    """
    try:
        async with asyncio.timeout(DOCUMENT_TIMEOUT):
            status, body = await exchange(endpoint, path)
    except TimeoutError as error:
        raise ServerError(f"{endpoint.url} did not answer GET {path} within {DOCUMENT_TIMEOUT:g} s") from error
    if status != 200:
        raise ServerError(f"GET {path}: status {status}: {body[:500].decode(errors='replace')}")
    return body


async def exchange(endpoint: Endpoint, path: str) -> tuple[int, bytes]:
    reader, writer = await connect(endpoint)
    try:
        writer.write(request_bytes(endpoint, "GET", path, b""))
        await writer.drain()
        status, headers = await read_head(reader)
        return status, await read_body(reader, headers)
    finally:
        writer.close()


async def first_model(endpoint: Endpoint) -> str:
    """The name of the first model the server lists."""
    models = (await get_json(endpoint, "/v1/models")).get("data") or []
    if not models:
        raise ServerError(f"{endpoint.url} lists no model; name one with --model")
    return str(models[0]["id"])


async def connect(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(endpoint.url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    return await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=MAX_LINE)


def request_bytes(endpoint: Endpoint, method: str, path: str, body: bytes) -> bytes:
    parts = urlsplit(endpoint.url)
    base = parts.path.rstrip("/").removesuffix("/v1")
    head = [
        f"{method} {base}{path} HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
    ]
    if endpoint.api_key:
        head.append(f"Authorization: Bearer {endpoint.api_key}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case) of an answer."""
    words = (await reader.readline()).split()
    if len(words) < 2 or not words[1].isdigit():
        raise ServerError("the server closed the connection without an answer")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return int(words[1]), headers


async def parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The pieces of a body as they arrive: HTTP chunks, or whatever a read gives."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        left = int(headers.get("content-length", MAX_LINE))
        while left > 0 and (piece := await reader.read(min(left, 2**16))):
            left -= len(piece)
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def lines(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[tuple[float, bytes]]:
    rest = b""
    async for piece in parts(reader, headers):
        now = time.perf_counter()
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield now, line


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    return b"".join([piece async for piece in parts(reader, headers)])
