"""Workers that do not keep to HTTP: each is one of two, and the other answers as it should."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from .conftest import RunningGateway, SmallWorker, eventually, expected_text, gateway_starter


class ScriptedWorker:
    """Is healthy, and answers every other request with the same bytes; then it closes, or holds the connection."""

    def __init__(self, script: bytes | Callable[[socket.socket], None], *, closes: bool = True) -> None:
        self.script, self.closes = script, closes
        self.asked = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                request = connection.recv(1_000_000)
                if request.startswith(b"GET "):
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                    return
                self.asked += 1
                if callable(self.script):
                    self.script(connection)
                else:
                    connection.sendall(self.script)
                if not self.closes:
                    connection.recv(1)
            except OSError:
                return


def endless(start: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(piece)

    return send


OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
BROKEN: dict[str, bytes | Callable[[socket.socket], None]] = {
    "nothing": b"",
    "garbage": b"\x00\x01\x02 hello \r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-",
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}}",
    "length and chunks": OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "too short": OK + b"content-length: 100\r\n\r\n{}",
    "more than its length": OK + b"content-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother",
    "a bad chunk": OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "chunks without end": OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "headers without end": endless(OK, b"x: y\r\n"),
    "one header without end": endless(OK, b"y" * 1_000),
    "interim answers without end": endless(b"", b"HTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n"),
    "events without an end of any": EVENTS + b"transfer-encoding: chunked\r\n\r\n7\r\ndata: {\r\n",
}


@pytest.fixture(scope="module")
def bad() -> Iterator[ScriptedWorker]:
    worker = ScriptedWorker(b"")
    yield worker
    worker.socket.close()


@pytest.fixture(scope="module")
def gateway(bad: ScriptedWorker) -> Iterator[RunningGateway]:
    with contextlib.ExitStack() as stack:
        good = SmallWorker()
        stack.callback(good.close)
        yield gateway_starter(stack)([bad, good], "--policy", "round_robin")


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_answer_costs_a_try_elsewhere(what: str, bad: ScriptedWorker, gateway: RunningGateway) -> None:
    bad.script, bad.asked = BROKEN[what], 0
    retries = gateway.metric("caudex_gateway_retries_total", worker=bad.url)

    def asked() -> int:
        """The worker rests for a second after three failures, so it may be some time until it is asked again."""
        answer = gateway.chat(what)
        assert answer.json()["choices"][0]["message"]["content"] == expected_text(what)
        return bad.asked

    eventually(asked, "the worker to be asked")
    assert gateway.metric("caudex_gateway_retries_total", worker=bad.url) == retries + bad.asked


def test_a_length_that_is_not_reached_ends_what_was_begun(start_gateway: Callable[..., RunningGateway]) -> None:
    """An answer too large to be held back is on its way when the worker closes: the client sees that it is cut."""
    worker = ScriptedWorker(OK + b"content-length: 3000000\r\n\r\n" + b"x" * 2_000_000)
    gateway = start_gateway([worker])
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as client:
        client.sendall(b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: a/b\r\ncontent-length: 1\r\n\r\nx")
        received = 0
        try:
            while piece := client.recv(100_000):
                received += len(piece)
        except ConnectionResetError:
            pass
    assert received < 3_000_000
    assert gateway.metric("caudex_gateway_broken_streams_total") == 1


def test_compressed_answers_go_through_as_they_are(start_gateway: Callable[..., RunningGateway]) -> None:
    """None was asked for. Events in a compressed stream cannot be told apart, so it is not held back for them."""
    text = json.dumps({"choices": []}).encode()
    packed = gzip.compress(text)
    whole = OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed
    assert start_gateway([ScriptedWorker(whole)]).chat("x").content == text

    head = EVENTS + b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
    worker = ScriptedWorker(head + b"%x\r\n%b\r\n" % (len(packed), packed), closes=False)
    gateway = start_gateway([worker])
    with gateway.client.stream("POST", "/v1/chat/completions", json={"stream": True, "messages": []}) as response:
        assert next(response.iter_raw()) == packed
    assert eventually(lambda: gateway.metric("caudex_gateway_worker_in_flight") == 0, "the work to be cancelled")
