"""Clients that do not keep to HTTP, or keep to it in bad faith."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from collections.abc import Iterator

import pytest

from .conftest import PATIENCE, RunningGateway, SmallWorker, chat_body, eventually, gateway_starter


def talk(port: int, data: bytes) -> bytes:
    """Sends bytes as they are; all that comes back until the gateway closes or goes quiet."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        connection.sendall(data)
        connection.settimeout(1.0)
        try:
            while piece := connection.recv(65536):
                received += piece
        except (TimeoutError, ConnectionResetError):
            pass
    return received


def post(body: bytes, *headers: bytes) -> bytes:
    head = [b"POST /v1/chat/completions HTTP/1.1", b"host: x", *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


LONE = b'{"messages": [], "session_id": "\\ud800"}'
GOOD = json.dumps(chat_body("fine")).encode()


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with contextlib.ExitStack() as stack:
        worker = SmallWorker()
        stack.callback(worker.close)
        yield gateway_starter(stack)(
            [worker], "--max-body-bytes", "100000", "--header-timeout", "2", "--stream-idle-timeout", "2"
        )


HOSTILE = {
    "length and chunks": (post(b"0\r\n\r\n" + GOOD, b"content-length: 5", b"transfer-encoding: chunked"), 400),
    "length before chunks": (
        post(b"0\r\n\r\n" + GOOD, b"transfer-encoding: chunked", b"content-length: %d" % len(GOOD)),
        400,
    ),
    "chunks twice": (post(b"0\r\n\r\n", b"transfer-encoding: chunked, chunked"), 400),
    "chunks in two headers": (post(b"0\r\n\r\n", b"transfer-encoding: chunked", b"transfer-encoding: gzip"), 400),
    "another coding": (post(b"0\r\n\r\n", b"transfer-encoding: gzip, chunked"), 400),
    "a coding that is none": (post(b"0\r\n\r\n", b"transfer-encoding: xchunked"), 400),
    "a list of lengths": (post(GOOD, b"content-length: 5, 5"), 400),
    "a signed length": (post(GOOD, b"content-length: +5"), 400),
    "a length in hex": (post(GOOD, b"content-length: 0x5"), 400),
    "a folded header": (post(GOOD, b"x: a", b" content-length: 5"), 400),
    "bare line feeds": (b"POST /v1/chat/completions HTTP/1.1\nhost: x\ncontent-length: 0\n\n", 400),
    "a bare carriage return": (post(b"", b"x: a\rcontent-length: 5"), 400),
    "nul in a header": (post(b"", b"x: a\0b"), 400),
    "a chunk size too long": (post(b"f" * 17 + b"\r\n", b"transfer-encoding: chunked"), 400),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no version": (b"GET /v1/models\r\n\r\n", 400),
    "connect": (b"CONNECT /v1/x HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a fragment": (b"POST /v1/chat/completions#x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 400),
    "a backslash": (b"POST /v1\\chat HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 404),
    "a backslash further down": (b"POST /v1/a\\b HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 400),
    "two slashes": (b"POST /v1//chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", 400),
    "another host's address": (b"GET http://else/v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    "the admin api, turned off": (b"GET /admin/workers HTTP/1.1\r\nhost: x\r\n\r\n", 404),
    "two lengths": (post(GOOD, b"content-length: 5", b"content-length: 9"), 400),
    "negative length": (post(GOOD, b"content-length: -5"), 400),
    "bad chunk": (post(b"zz\r\nhello\r\n", b"transfer-encoding: chunked"), 400),
    "space before colon": (post(GOOD, b"content-length : 5"), 400),
    "not http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "upgrade": (b"GET /v1/x HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", 400),
    "announced too large": (post(b"", b"content-length: 99999999999"), 413),
    "too large, asking first": (post(b"", b"expect: 100-continue", b"content-length: 99999999999"), 413),
    "too large in chunks": (post((b"ffff\r\n" + b"x" * 65535 + b"\r\n") * 3, b"transfer-encoding: chunked"), 413),
    "a long header": (post(b"", b"x: " + b"y" * 70_000), 431),
    "many headers": (post(b"", *[b"x%d: y" % i for i in range(20_000)]), 431),
    "a long target": (b"GET /v1/" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
    "a length behind chunks": (post(b"0\r\ncontent-length: 5\r\n\r\n", b"transfer-encoding: chunked"), 400),
    "trailers without end": (
        post(
            b"%x\r\n%b\r\n0\r\n" % (len(GOOD), GOOD) + b"x: y\r\n" * 20_000,
            b"transfer-encoding: chunked",
        ),
        431,
    ),
    "a lone surrogate": (post(LONE, b"content-length: %d" % len(LONE)), 400),
    "bad utf-8": (post(b'{"model": "\xff\xfe"}', b"content-length: 15"), 400),
    "not json": (post(b"hello", b"content-length: 5"), 400),
    "json but no object": (post(b"[1,2]", b"content-length: 5"), 400),
    "deep json": (post(b"[" * 50_000, b"content-length: 50000"), 400),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_requests_are_refused_in_openais_shape(what: str, gateway: RunningGateway) -> None:
    data, status = HOSTILE[what]
    answer = talk(gateway.port, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert gateway.chat("still there").status_code == 200


def test_chunked_and_pipelined_requests_are_answered_in_order(gateway: RunningGateway) -> None:
    chunked = post(b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD), b"transfer-encoding: chunked")
    bodies = [json.dumps(chat_body(f"p{i}")).encode() for i in range(40)]
    sized = b"".join(post(body, b"content-length: %d" % len(body)) for body in bodies)
    answer = talk(gateway.port, chunked + sized)
    assert answer.count(b"HTTP/1.1 200") == 41
    positions = [answer.index(b"p%d-0 " % i) for i in range(40)]
    assert positions == sorted(positions)


def test_expect_continue_and_http_1_0(gateway: RunningGateway) -> None:
    answer = talk(gateway.port, post(GOOD, b"content-length: %d" % len(GOOD), b"expect: 100-continue"))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    stream = json.dumps(chat_body("old", stream=True)).encode()
    old = post(stream, b"content-length: %d" % len(stream)).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    head, _, body = talk(gateway.port, old).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")


def test_thousands_of_idle_connections_and_a_slow_one_disturb_nobody(gateway: RunningGateway) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    idle = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(min(3_000, most - 200))]
    try:
        idle[0].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        assert all(gateway.chat(f"p{i}").status_code == 200 for i in range(20))
        idle[0].settimeout(PATIENCE)
        assert idle[0].recv(1000).startswith(b"HTTP/1.1 408")
    finally:
        for connection in idle:
            connection.close()


def test_headers_that_never_end_are_ended(gateway: RunningGateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1_000):
                connection.sendall(b"y" * 10_000)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1_000).startswith(b"HTTP/1.1 431")
    assert gateway.chat("still there").status_code == 200


def test_chunk_extensions_and_trailers_go_no_further(gateway: RunningGateway) -> None:
    trailers = b"x-session-id: other\r\nauthorization: Bearer k\r\n"
    body = b"%x;a=b;c\r\n%b\r\n0;last\r\n%b\r\n" % (len(GOOD), GOOD, trailers)
    answer = talk(
        gateway.port, post(body, b"transfer-encoding: chunked") + post(GOOD, b"content-length: %d" % len(GOOD))
    )
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b"fine-2") == 2


def test_what_follows_a_body_is_a_request_of_its_own(gateway: RunningGateway) -> None:
    """A request hidden in a body reaches no worker as one; what stands behind the body is answered as what it is."""
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    body = json.dumps(chat_body("fine", note=hidden.decode())).encode()
    answer = talk(
        gateway.port, post(body, b"content-length: %d" % len(body)) + b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404"]


def test_a_client_that_closes_its_half_has_left(gateway: RunningGateway) -> None:
    """Half closed and gone look the same, and the work of clients that are gone must end."""
    body = json.dumps(chat_body("x", metadata={"words": 10_000, "gap": 0.02})).encode()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE) as connection:
        connection.sendall(post(body, b"content-length: %d" % len(body)))
        eventually(lambda: gateway.metric("caudex_gateway_worker_in_flight") == 1, "the request to be sent")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1_000) == b""
    assert eventually(lambda: gateway.metric("caudex_gateway_worker_in_flight") == 0, "the work to be cancelled")


def test_a_client_that_never_reads_holds_nothing_for_long_and_no_worker_is_blamed(gateway: RunningGateway) -> None:
    body = json.dumps(chat_body("x" * 20, stream=True, metadata={"words": 200_000})).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(post(body, b"content-length: %d" % len(body)))
        eventually(lambda: gateway.metric("caudex_gateway_worker_in_flight") == 1, "the request to be sent")
        assert eventually(lambda: gateway.metric("caudex_gateway_worker_in_flight") == 0, "the client to be given up")
    assert gateway.metric("caudex_gateway_broken_streams_total") == 0
    assert gateway.chat("next").status_code == 200
