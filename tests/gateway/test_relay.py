"""What a client gets through the gateway when all is well."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from .conftest import RunningGateway, SmallWorker, chat_body, eventually, expected_text

Start = Callable[..., RunningGateway]


def test_a_stream_is_passed_on_byte_for_byte(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers)
    body = chat_body("grüße 你好", stream=True, stream_options={"include_usage": True}, metadata={"words": 40})
    direct = httpx.post(f"{two_workers[0].url}/v1/chat/completions", json=body).content
    relayed = [gateway.client.post("/v1/chat/completions", json=body) for _ in range(4)]
    assert all(response.content.replace(b'"cached_tokens": 2', b'"cached_tokens": 0') == direct for response in relayed)
    assert relayed[0].headers["content-type"] == "text/event-stream"


def test_events_arrive_one_by_one(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers)
    body = chat_body("slow", stream=True, metadata={"words": 6, "gap": 0.1})
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
        pieces = [piece for piece in response.iter_raw() if piece]
    assert len(pieces) >= 6


def test_the_openai_client_works(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers)
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any")
    answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == expected_text("hello")
    stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected_text("hi")
    assert [model.id for model in client.models.list()] == ["m"]


def test_everything_under_v1_goes_through_with_its_query(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers)
    gateway.client.post("/v1/anything/at/all?x=1&y=%2F", json=chat_body("q"))
    targets = [target for worker in two_workers for target in worker.stats()["targets"]]
    assert targets == ["/v1/anything/at/all?x=1&y=%2F"]
    assert gateway.client.get("/elsewhere").status_code == 404
    assert gateway.client.head("/v1/models").status_code == 200


def test_conversations_hit_and_predictions_are_honest(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers)
    for session in range(6):
        system = f"session {session} " + "rules " * 400
        for turn in range(4):
            response = gateway.chat(f"turn {turn}", system=system)
            cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 500) == (turn > 0)
    predicted, reported = (
        gateway.metric(f"caudex_gateway_{kind}_cached_tokens_total") for kind in ("predicted", "reported")
    )
    assert reported > 0
    assert abs(predicted - reported) < 0.1 * reported
    assert gateway.metric("caudex_gateway_index_drops_total", cause="drift") == 0
    shares = [worker.stats()["requests"] for worker in two_workers]
    assert min(shares) >= 4


def test_an_index_that_is_wrong_about_a_worker_is_dropped(
    start_worker: Callable[[], SmallWorker], start_gateway: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    gateway = start_gateway([start_worker()])
    for i in range(60):
        gateway.chat(f"turn {i}", system="rules " * 400, metadata={"cold": True})
    assert gateway.metric("caudex_gateway_index_drops_total", cause="drift") >= 1
    assert "cached tokens a request were predicted and 0 reported; its index is dropped" in capfd.readouterr().err


def test_counts_add_up_under_load(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers)

    def one(i: int) -> bool:
        response = gateway.chat(f"prompt {i}", stream=i % 2 == 0, metadata={"words": 1 + i % 7})
        return response.status_code == 200 and f"prompt {i}-0" in response.text

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(300)))
    seen = [worker.stats() for worker in two_workers]
    assert sum(stats["requests"] for stats in seen) == sum(stats["finished"] for stats in seen) == 300
    assert gateway.metric("caudex_gateway_retries_total") == 0
    assert eventually(lambda: gateway.metric("caudex_gateway_worker_in_flight") == 0, "nothing to be in flight")


@pytest.mark.parametrize("policy", ["session", "consistent_hash"])
def test_a_session_stays_on_its_worker(policy: str, two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers, "--policy", policy)
    for i in range(6):
        gateway.chat("the same first words " * 20 + str(i), headers={"x-session-id": "abc"})
    assert sorted(worker.stats()["requests"] for worker in two_workers) == [0, 6]


def test_a_client_that_closes_at_done_has_had_all(
    start_worker: Callable[[], SmallWorker], start_gateway: Start
) -> None:
    gateway = start_gateway([start_worker()])
    body = chat_body("x", stream=True, stream_options={"include_usage": True}, metadata={"linger": 0.5})
    with gateway.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                break
    assert eventually(lambda: gateway.metric("caudex_gateway_requests_total", status="200") >= 1, "it to count as 200")
    assert gateway.metric("caudex_gateway_client_disconnects_total") == 0
    assert gateway.metric("caudex_gateway_prompt_tokens_total") > 0


class EchoWorker:
    """Answers with what it got; if `one_answer_each`, closes a connection when a second request comes on it."""

    def __init__(self, *, one_answer_each: bool = False) -> None:
        self.one_answer_each = one_answer_each
        self.unanswered = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        data, answered = b"", 0
        with connection:
            while piece := connection.recv(65536):
                data += piece
                head, found, body = data.partition(b"\r\n\r\n")
                length = int(dict(re.findall(rb"(?i)(content-length): (\d+)", head)).get(b"content-length", 0))
                if not found or len(body) < length:
                    continue
                if self.one_answer_each and answered:
                    self.unanswered += 1
                    return
                text = data.decode("latin-1").encode()
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
                data, answered = b"", answered + 1


@pytest.fixture
def echo() -> Iterator[EchoWorker]:
    worker = EchoWorker()
    yield worker
    worker.socket.close()


def test_uploads_go_through_and_connection_headers_do_not(echo: EchoWorker, start_gateway: Start) -> None:
    gateway = start_gateway([echo])
    upload = {"file": ("a.wav", b"\x00\xff\xfe binary", "audio/wav")}
    headers = {"connection": "keep-alive, x-secret", "x-secret": "1", "x-kept": "2", "accept-encoding": "gzip"}
    echoed = gateway.client.post("/v1/audio/transcriptions", files=upload, headers=headers).content
    assert "\x00ÿþ binary".encode() in echoed
    assert b"x-kept: 2" in echoed
    assert b"x-secret" not in echoed
    assert b"gzip" not in echoed
    assert f"host: 127.0.0.1:{echo.port}".encode() in echoed


@pytest.mark.parametrize("path", ["/v1/../reset_prefix_cache", "/v1/%2e%2e/reset_prefix_cache"])
def test_paths_do_not_lead_out_of_v1(path: str, echo: EchoWorker, start_gateway: Start) -> None:
    gateway = start_gateway([echo])
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_kept_connection_that_was_being_closed_costs_the_only_worker_nothing(start_gateway: Start) -> None:
    worker = EchoWorker(one_answer_each=True)
    gateway = start_gateway([worker], "--probe-interval", "20")
    answers = [gateway.chat(f"p{i}") for i in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert worker.unanswered >= 1
    worker.socket.close()


def test_what_builds_on_a_response_goes_to_the_worker_that_gave_it(
    two_workers: list[SmallWorker], start_gateway: Start
) -> None:
    gateway = start_gateway(two_workers, "--policy", "round_robin")
    response_id = None
    for _ in range(6):
        body = {"model": "m", "input": "go on", "previous_response_id": response_id}
        response_id = gateway.client.post("/v1/responses", json=body).json()["id"]
    assert sorted(worker.stats()["requests"] for worker in two_workers) == [0, 6]
