"""The client against servers that answer byte by byte, break off, refuse, or tell nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from caudex.bench import client
from caudex.bench.client import Endpoint, Record, ServerError, first_model, measure, request_bytes

EVENTS = (
    b'data: {"choices": [{"text": "Hel"}]}\n\n'
    b": a comment\n\n"
    b'data: {"choices": [{"text": "lo"}], "usage": null}\r\n\r\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, '
    b'"prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
    b"data: [DONE]\n\n"
)


def chunked(pieces: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def head(*headers: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"", b""])


async def answering(answer: bytes, ask):
    """Run `ask(endpoint)` against a server that sends `answer` to whoever asks, and then closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await ask(Endpoint(f"http://127.0.0.1:{port}", "m", timeout=5))


def complete(answer: bytes) -> tuple[Record, str]:
    async def ask(endpoint: Endpoint) -> tuple[Record, str]:
        return await measure(endpoint, "/v1/completions", {"prompt": "x"}, first=True)

    return asyncio.run(answering(answer, ask))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_chunked_stream_cut_anywhere(size: int) -> None:
    pieces = [EVENTS[at : at + size] for at in range(0, len(EVENTS), size)]
    record, text = complete(head(b"Transfer-Encoding: chunked") + chunked(pieces))
    assert text == "Hello"
    assert record.error is None
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (9, 2, 4)
    assert len(record.gaps) == 1
    assert 0 < record.ttft <= record.total


def test_a_stream_that_ends_with_the_connection() -> None:
    assert complete(head(b"Connection: close") + EVENTS)[1] == "Hello"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "without an answer"),
        (head(b"Content-Length: 5", status=b"400 Bad Request") + b"oh no", "status 400: oh no"),
        (head(b"Transfer-Encoding: chunked") + chunked([EVENTS[:40]]), "without [DONE]"),
        (head(b"Transfer-Encoding: chunked") + b"ff\r\ndata", "255"),
        (head() + b'data: {"error": {"message": "out of luck"}}\n\n', "out of luck"),
        (head() + b"data: {nonsense\n\n", "JSON"),
    ],
)
def test_a_failure_is_a_record_with_an_error(answer: bytes, said: str) -> None:
    record, _ = complete(answer)
    assert record.error is not None
    assert said in record.error


def test_nobody_listening_is_an_error_too() -> None:
    record, text = asyncio.run(measure(Endpoint("http://127.0.0.1:9", "m"), "/v1/completions", {}, first=True))
    assert record.error
    assert text == ""


def test_the_first_model_is_found_or_asked_for() -> None:
    body = b'{"data": [{"id": "a"}, {"id": "b"}]}'
    answer = head(b"Content-Length: %d" % len(body)) + body
    assert asyncio.run(answering(answer, first_model)) == "a"
    with pytest.raises(ServerError, match="--model"):
        asyncio.run(answering(head(b"Content-Length: 12") + b'{"data": []}', first_model))


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_may_end_with_the_version(url: str) -> None:
    sent = request_bytes(Endpoint(url, "m"), "GET", "/v1/models", b"")
    assert sent.startswith(b"GET /v1/models HTTP/1.1\r\nHost: h:1\r\n")


def test_a_key_is_sent_when_there_is_one() -> None:
    assert b"Authorization: Bearer k\r\n" in request_bytes(Endpoint("http://h", "m", "k"), "GET", "/", b"")
    assert b"Authorization" not in request_bytes(Endpoint("http://h", "m"), "GET", "/", b"")


def test_a_server_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "DOCUMENT_TIMEOUT", 0.2)

    async def run() -> None:
        async with await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0) as silent:
            port = silent.sockets[0].getsockname()[1]
            with pytest.raises(ServerError, match=f"127.0.0.1:{port} did not answer GET /v1/models within 0.2 s"):
                await first_model(Endpoint(f"http://127.0.0.1:{port}", "m"))

    asyncio.run(run())
