"""The bytes of a stream, as any HTTP client sees them."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest


def exchange(url: str, path: str, body: dict) -> bytes:
    """All that a server sends over a bare socket for one POST."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


def dechunk(body: bytes) -> bytes:
    whole = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert body == b"\r\n"
            return whole
        whole, body = whole + body[:length], body[length:]
        assert body[:2] == b"\r\n"
        body = body[2:]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "stream me"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "stream me"}]}),
    ],
)
def test_every_event_is_one_line_of_json_and_a_blank_one(server, path: str, prompt: dict) -> None:
    fields = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    received = exchange(server.url, path, prompt | fields)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/event-stream; charset=utf-8" in head.lower()
    assert b"transfer-encoding: chunked" in head.lower()
    events = dechunk(body).split(b"\n\n")
    assert events.pop() == b""
    assert events.pop() == b"data: [DONE]"
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    parsed = [json.loads(event[6:]) for event in events]
    tokens = [token for chunk in parsed for token in chunk["choices"][0].get("token_ids", [])]
    assert len(tokens) == 6
    assert [chunk["choices"][0]["finish_reason"] for chunk in parsed] == [None] * (len(parsed) - 1) + ["length"]


def test_usage_in_every_chunk_when_asked_for(server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "count", "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options}
    body["return_token_ids"] = True
    received = exchange(server.url, "/v1/completions", body)
    lines = dechunk(received.partition(b"\r\n\r\n")[2]).split(b"\n\n")[:-2]
    counts = [json.loads(line[6:])["usage"]["completion_tokens"] for line in lines]
    assert counts == [1, 2, 3, 4, 5, 5]


def test_text_is_never_cut_inside_a_character(server) -> None:
    """The tiny model's tokens are bytes, so its text is full of characters that are not whole yet."""
    body = {"prompt": "é", "max_tokens": 40, "temperature": 1, "seed": 3, "ignore_eos": True}
    whole = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    received = exchange(server.url, "/v1/completions", body | {"stream": True})
    lines = dechunk(received.partition(b"\r\n\r\n")[2]).split(b"\n\n")[:-2]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == whole


def test_a_connection_serves_one_request_after_another(server) -> None:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        for _ in range(3):
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert b"connection: close" not in answer.lower()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_fails_says_so_before_it_ends(fresh_server, path: str) -> None:
    question = [{"role": "user", "content": "go on"}]
    body = {"prompt": "go on", "messages": question, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with fresh_server() as server, server.http.stream("POST", path, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.engine.shutdown(drain=False)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert "shutting down" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
