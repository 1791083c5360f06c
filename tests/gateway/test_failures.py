"""Workers that die, hang, come back; clients that leave. Everything here is a real process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from caudex.bench.local import free_port

from .conftest import PATIENCE, RunningGateway, SmallWorker, chat_body, eventually, expected_text

Start = Callable[..., RunningGateway]


def client_bytes(port: int, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


def events_of(text: str) -> list[dict[str, object] | str]:
    assert text.endswith("\n\n")
    payloads = [block.removeprefix("data: ") for block in text.removesuffix("\n\n").split("\n\n")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@pytest.fixture(scope="module")
def lasting_workers() -> Iterator[list[SmallWorker]]:
    """For tests after which they are as before."""
    workers = [SmallWorker(), SmallWorker()]
    yield workers
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", [{"drop": "before"}, {"status": 503}, {"status": 500}])
def test_a_failure_before_the_first_byte_costs_a_try_elsewhere(
    how: dict[str, object], stream: bool, lasting_workers: list[SmallWorker], start_gateway: Start
) -> None:
    """Both fail in the same way, so each is tried once and neither twice, and the client is told."""
    gateway = start_gateway(lasting_workers)
    before = [worker.stats()["requests"] for worker in lasting_workers]
    response = gateway.chat("x", stream=stream, metadata=how)
    assert response.status_code == (how.get("status") or 502)
    assert "error" in response.json()
    assert [worker.stats()["requests"] for worker in lasting_workers] == [count + 1 for count in before]


def test_a_dead_worker_is_not_noticed_by_clients(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers, "--probe-interval", "30")
    two_workers[0].kill()
    for i in range(10):
        assert gateway.chat(f"p{i}").json()["choices"][0]["message"]["content"] == expected_text(f"p{i}")
    assert gateway.metric("caudex_gateway_retries_total", worker=two_workers[0].url) <= 1
    assert gateway.available() == 1


@pytest.mark.parametrize("how", ["die", "drop"])
def test_a_death_in_mid_stream_ends_with_an_error_event(
    how: str, two_workers: list[SmallWorker], start_gateway: Start
) -> None:
    gateway = start_gateway(two_workers)
    response = gateway.chat("x", stream=True, metadata={how: "mid", "words": 6})
    *words, last = events_of(response.text)
    assert len(words) == 4
    assert isinstance(last, dict)
    assert last["error"]["type"] == "upstream_error"  # type: ignore[index]
    assert gateway.metric("caudex_gateway_broken_streams_total") == 1
    assert gateway.chat("y").status_code == 200


def test_a_restarted_worker_gets_traffic_again_and_its_index_is_gone(
    two_workers: list[SmallWorker], start_gateway: Start
) -> None:
    gateway = start_gateway(two_workers)
    for i in range(4):
        gateway.chat("warm", system=f"{i} rules " * 300)
    two_workers[0].kill()
    gateway.wait_available(1)
    two_workers[0].start()
    gateway.wait_available(2)
    assert gateway.metric("caudex_gateway_index_drops_total", worker=two_workers[0].url, cause="restart") >= 1
    for i in range(12):
        assert gateway.chat(f"new {i}", system=f"other {i} rules " * 300).status_code == 200
    assert two_workers[0].stats()["requests"] >= 3


def test_a_paused_worker_hangs_no_client(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers, "--probe-interval", "0.2", "--probe-timeout", "0.3")
    two_workers[0].pause()
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: gateway.chat(f"p{i}", stream=i % 2 == 0).text, range(16)))
    assert all(f"p{i}-2" in text for i, text in enumerate(texts))
    two_workers[0].resume()
    gateway.wait_available(2)
    assert gateway.metric("caudex_gateway_index_drops_total", cause="restart") == 0


def test_a_worker_paused_in_mid_stream_ends_with_an_error_event(
    start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    worker = start_worker()
    gateway = start_gateway([worker], "--probe-interval", "0.2", "--probe-timeout", "0.3")
    body = chat_body("x", stream=True, metadata={"words": 1000, "gap": 0.05})
    received = ""
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for piece in response.iter_text():
            received += piece
            if len(received) > 500 and worker.process.poll() is None:
                worker.pause()
    assert "upstream_error" in received
    worker.resume()
    gateway.wait_available(1)
    assert eventually(lambda: worker.stats()["cancelled"] == 1, "the worker's work to be cancelled")


def test_with_all_workers_down_the_answer_is_503_at_once(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers)
    for worker in two_workers:
        worker.kill()
    gateway.wait_available(0)
    response = gateway.chat("x")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "overloaded_error"
    assert gateway.client.get("/health").status_code == 503


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_the_work(
    stream: bool, start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    worker = start_worker()
    gateway = start_gateway([worker])
    body = chat_body("x", stream=stream, metadata={"words": 10_000, "gap": 0.02})
    request = client_bytes(gateway.port, body)
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(request)
        eventually(lambda: worker.stats()["requests"] == 1, "the request to be sent")
    assert eventually(lambda: worker.stats()["cancelled"] == 1, "the worker's work to be cancelled")
    assert eventually(lambda: gateway.metric("caudex_gateway_worker_in_flight") == 0, "nothing to be in flight")
    assert worker.stats()["finished"] == 0


def test_a_drained_worker_finishes_what_it_has(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers, "--admin-key", "k", "--policy", "session")
    admin = {"authorization": "Bearer k"}
    results: list[str] = []

    def long_request() -> None:
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            body = chat_body("long", stream=True, metadata={"words": 30, "gap": 0.05})
            results.append(client.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"}).text)

    thread = threading.Thread(target=long_request)
    thread.start()
    home = eventually(lambda: next((w for w in two_workers if w.stats()["requests"]), None), "the request to be sent")
    assert gateway.client.post("/admin/workers/remove", json={"url": home.url}, headers=admin).status_code == 200
    assert gateway.chat("next", headers={"x-session-id": "s"}).status_code == 200
    assert home.stats()["requests"] == 1
    thread.join()
    assert "long-29" in results[0]
    assert "error" not in results[0]
    workers = eventually(
        lambda: (w := gateway.client.get("/admin/workers", headers=admin).json()["workers"]) and len(w) == 1 and w,
        "the worker to be removed",
    )
    assert workers[0]["url"] != home.url
    assert gateway.client.post("/admin/workers", json={"url": home.url}, headers=admin).status_code == 200
    gateway.wait_available(2)


def test_the_gateway_restarted_keeps_sessions_and_index(
    tmp_path: Path, start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    workers = [start_worker() for _ in range(3)]
    snapshot = str(tmp_path / "routing")
    for policy, header in (("session", "x-session-id"), ("cost", "x-ignored")):
        flags = ("--snapshot", f"{snapshot}.{policy}", "--policy", policy)
        first = start_gateway(workers, *flags)
        for i in range(9):
            first.chat("a", system=f"{policy} {i} rules " * 300, headers={header: str(i)})
        first.close(gently=True)
        before = [worker.stats()["requests"] for worker in workers]
        second = start_gateway(list(reversed(workers)), *flags)
        for i in range(9):
            usage = second.chat("b", system=f"{policy} {i} rules " * 300, headers={header: str(i)}).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert sum(worker.stats()["requests"] for worker in workers) == sum(before) + 9
        second.close(gently=True)


def test_a_broken_snapshot_is_not_used(
    tmp_path: Path, start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    snapshot = tmp_path / "routing"
    snapshot.write_bytes(b"caudex routing 1\n" + b"x" * 100)
    gateway = start_gateway([start_worker()], "--snapshot", str(snapshot))
    assert gateway.chat("x").status_code == 200


def test_ctrl_c_finishes_what_is_under_way(start_worker: Callable[[], SmallWorker], start_gateway: Start) -> None:
    worker = start_worker()
    gateway = start_gateway([worker])
    results: list[str] = []

    def long_request() -> None:
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            body = chat_body("long", stream=True, metadata={"words": 20, "gap": 0.05})
            results.append(client.post("/v1/chat/completions", json=body).text)

    thread = threading.Thread(target=long_request)
    thread.start()
    eventually(lambda: worker.stats()["requests"], "the request to be sent")
    gateway.close(gently=True)
    thread.join()
    assert "long-19" in results[0]


def test_a_request_on_its_way_to_a_gateway_that_stops_is_answered(
    start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    """On connections that are there: one that has not asked yet, and one that is in the middle of its request."""
    gateway = start_gateway([start_worker()])
    request = client_bytes(gateway.port, chat_body("late"))
    address = ("127.0.0.1", gateway.port)

    def stopping() -> bool:
        try:
            socket.create_connection(address).close()
        except ConnectionRefusedError:
            return True
        return False

    with socket.create_connection(address) as new, socket.create_connection(address) as begun:
        begun.sendall(request[:-5])
        assert gateway.chat("sees that both were accepted").status_code == 200
        gateway.process.send_signal(signal.SIGINT)
        eventually(stopping, "the gateway to listen no more")
        new.sendall(request)
        begun.sendall(request[-5:])
        for connection in (new, begun):
            received = b"".join(iter(lambda connection=connection: connection.recv(65_536), b""))  # type: ignore[misc]
            assert received.startswith(b"HTTP/1.1 200")
            assert b"late-2" in received
    assert gateway.process.wait() == 0


def test_a_gateway_that_stood_still_blames_nobody(
    start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    """A request that came while it was paused for longer than a client may take to send one is answered."""
    gateway = start_gateway([start_worker()], "--header-timeout", "2")
    request = client_bytes(gateway.port, chat_body("patient"))
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE) as connection:
        assert gateway.chat("sees that the other was accepted").status_code == 200
        gateway.process.send_signal(signal.SIGSTOP)
        connection.sendall(request)
        time.sleep(3.5)
        gateway.process.send_signal(signal.SIGCONT)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


def test_ctrl_c_leaves_nothing_on_the_screen() -> None:
    command = [sys.executable, "-m", "caudex", "route", "--worker", f"http://127.0.0.1:{free_port()}", "--port", "0"]
    process = subprocess.Popen([*command, "--log-level", "error"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("caudex route: ")
    process.send_signal(signal.SIGINT)
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_killed_workers_under_load_give_no_wrong_answer(
    start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    """Every request ends: with the whole right text, or with a right beginning and an error event, or with 5xx."""
    workers = [start_worker() for _ in range(3)]
    gateway = start_gateway(workers)
    done = threading.Event()

    def trouble() -> None:
        for i in range(6):
            workers[i % 2].kill()
            workers[i % 2].start()
            if done.wait(0.3):
                return

    def one(i: int) -> str:
        response = gateway.chat(f"q{i}", stream=True, metadata={"words": 8, "gap": 0.01})
        if response.status_code != 200:
            return "refused" if response.status_code in (502, 503) else f"status {response.status_code}"
        events = events_of(response.text)
        deltas = [e["choices"][0]["delta"]["content"] for e in events if isinstance(e, dict) and "choices" in e]  # type: ignore[index]
        if not expected_text(f"q{i}", 8).startswith("".join(deltas)):
            return f"wrong answer {response.text}"
        if events[-1] == "[DONE]":
            return "whole" if len(deltas) == 8 else "short"
        return "told" if isinstance(events[-1], dict) and "error" in events[-1] else "silent cut"

    thread = threading.Thread(target=trouble)
    thread.start()
    with ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(one, range(250)))
    done.set()
    thread.join()
    assert set(outcomes) <= {"whole", "told", "refused"}
    assert outcomes.count("whole") > 200
    assert eventually(lambda: gateway.metric("caudex_gateway_worker_in_flight") == 0, "nothing to be in flight")
