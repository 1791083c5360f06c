"""Clients that are silent, slow, or gone without a word: their connections end, and so do their requests."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from caudex.server.connection import MAX_HEAD
from caudex.server.settings import ServerSettings

LONG = {"prompt": "go on", "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 60, "return_token_ids": True}


@pytest.fixture(scope="module")
def impatient(config) -> Iterator:
    from .conftest import serving

    with serving(config, ServerSettings(client_timeout=1.0)) as running:
        yield running


def connect(server, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(60)
    client.connect(("127.0.0.1", urlsplit(server.url).port))
    return client


def post(body: bytes, announced: int | None = None) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {announced or len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_head_that_does_not_arrive(impatient, sent: bytes) -> None:
    with connect(impatient) as client:
        client.sendall(sent)
        assert client.recv(100) == b"", "the server is to close the connection"


def test_a_second_head_that_does_not_arrive(impatient) -> None:
    with connect(impatient) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(10_000).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /hea")
        assert client.recv(100) == b""


def test_a_head_without_end(impatient) -> None:
    endless = b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(MAX_HEAD))
    with connect(impatient) as client, contextlib.suppress(ConnectionError):
        client.sendall(endless + b"\r\n")
        assert not client.recv(100).startswith(b"HTTP/1.1 200")
    assert impatient.http.get("/health").status_code == 200


def test_a_body_that_does_not_arrive(impatient) -> None:
    with connect(impatient) as client:
        client.sendall(post(b'{"prompt"', announced=500))
        answer = client.recv(10_000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"in time" in answer


def test_a_slow_head_within_the_limit_is_answered(impatient) -> None:
    with connect(impatient) as client:
        for piece in (b"GET /health ", b"HTTP/1.1\r\n", b"Host: x\r\n\r\n"):
            client.sendall(piece)
            time.sleep(0.05)
        assert client.recv(10_000).startswith(b"HTTP/1.1 200")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such limit")
def test_an_answer_that_nobody_reads(impatient) -> None:
    """The client stays and takes nothing: what waits for it is bounded, and after a while its requests are aborted."""
    with connect(impatient, receive_buffer=2048) as client:
        client.sendall(post(json.dumps(LONG).encode()))
        client.recv(100)
        stats = impatient.settled(lambda stats: stats.requests_finished.get("abort", 0) > 0, seconds=60)
        assert stats.num_blocks > 0
    stats = impatient.settled(lambda stats: stats.num_requests_running + stats.num_requests_waiting == 0)
    assert stats.num_pinned_blocks == 0
    assert impatient.complete("hi")["choices"]
