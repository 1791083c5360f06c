"""Tenants, queues, and hostile HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from .conftest import PATIENCE, RunningGateway, SmallWorker, chat_body, eventually, gateway_starter

Start = Callable[..., RunningGateway]


@pytest.fixture
def tenants_file(tmp_path: Path) -> str:
    tenants = [
        {"name": "alice", "keys": ["alice-key"], "salt": "a"},
        {"name": "bob", "keys": ["bob-key"], "salt": "b", "requests_per_minute": 3},
        {"name": "carol", "keys": ["carol-key"], "max_concurrency": 1},
    ]
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": tenants}))
    return str(path)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


def test_a_client_cannot_choose_another_tenants_salt(
    tenants_file: str, start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    worker = start_worker()
    gateway = start_gateway([worker], "--tenants", tenants_file)
    assert gateway.chat("x").status_code == 401
    assert gateway.chat("x", headers=key("mallory")).status_code == 401
    assert gateway.chat("x", headers=key("alice")).status_code == 200
    alices = worker.stats()["salts"][-1]
    escaped = json.dumps(chat_body("x")).replace("{", '{"cache\\u005fsalt": "' + alices + '", ', 1)
    twice = json.dumps(chat_body("x", cache_salt=alices)).replace("{", '{"cache_salt": "y", ', 1)
    for body in (json.dumps(chat_body("x")), json.dumps(chat_body("x", cache_salt=alices)), escaped, twice):
        if gateway.metric("caudex_gateway_rejected_total", tenant="bob") == 0:
            gateway.client.post("/v1/chat/completions", content=body, headers=key("bob"))
    salts = worker.stats()["salts"]
    assert len(salts) >= 4
    assert None not in salts
    assert alices not in salts[1:]
    assert set(worker.stats()["authorizations"]) == {None}


def test_rates_and_concurrency_are_limited_by_tenant(
    tenants_file: str, start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    worker = start_worker()
    gateway = start_gateway([worker], "--tenants", tenants_file)
    answers = [gateway.chat("x", headers=key("bob")) for _ in range(6)]
    statuses = [answer.status_code for answer in answers]
    assert 200 in statuses
    assert statuses[-1] == 429
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert gateway.chat("x", headers=key("alice")).status_code == 200

    before = worker.stats()["requests"]
    slow = chat_body("x", metadata={"prefill": 2.0})
    thread = threading.Thread(
        target=lambda: httpx.post(f"{gateway.url}/v1/chat/completions", json=slow, headers=key("carol"), timeout=60)
    )
    thread.start()
    eventually(lambda: worker.stats()["requests"] > before, "the first request to be sent")
    assert gateway.chat("x", headers=key("carol")).status_code == 429
    thread.join()
    assert gateway.chat("x", headers=key("carol")).status_code == 200


def test_a_full_queue_says_when_to_come_again(start_worker: Callable[[], SmallWorker], start_gateway: Start) -> None:
    worker = start_worker()
    gateway = start_gateway([worker], "--max-concurrency", "2", "--max-queue", "2")
    statuses: list[tuple[int, str | None]] = []

    def one() -> None:
        response = httpx.post(
            f"{gateway.url}/v1/chat/completions", json=chat_body("x", metadata={"prefill": 1.0}), timeout=60
        )
        statuses.append((response.status_code, response.headers.get("retry-after")))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(status for status, _ in statuses) == [200] * 4 + [429] * 4
    assert all(retry_after is not None for status, retry_after in statuses if status == 429)
    assert worker.stats()["requests"] == 4


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


GOOD = json.dumps(chat_body("fine")).encode()


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with contextlib.ExitStack() as stack:
        worker = SmallWorker()
        stack.callback(worker.close)
        yield gateway_starter(stack)([worker], "--max-body-bytes", "100000", "--header-timeout", "2")


HOSTILE = {
    "length and chunks": (post(b"0\r\n\r\n" + GOOD, b"content-length: 5", b"transfer-encoding: chunked"), 400),
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


def test_a_thousand_idle_connections_and_a_slow_one_disturb_nobody(gateway: RunningGateway) -> None:
    idle = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(900)]
    try:
        idle[0].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        assert all(gateway.chat(f"p{i}").status_code == 200 for i in range(20))
        idle[0].settimeout(PATIENCE)
        assert idle[0].recv(1000).startswith(b"HTTP/1.1 408")
    finally:
        for connection in idle:
            connection.close()
