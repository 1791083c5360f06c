"""`caudex serve` publishes what its cache holds: a gateway that only listens predicts what the answers then report."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import RunningGateway, eventually
from tests.server.test_process import SERVE, process

from caudex.bench.local import free_port

zmq = pytest.importorskip("zmq")

BLOCK = 16
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "A caudex is a stem that keeps water. " * 4 + "Mostly."},
        {"role": "user", "content": "So?"},
    ],
    "max_tokens": 1,
}


def events_flags(port: int, replay_port: int) -> list[str]:
    addresses = (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}")
    return ["--kv-events-endpoint", addresses[0], "--kv-events-replay-endpoint", addresses[1]]


def cached_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture
def followed(model_directory: Path, tmp_path: Path) -> Iterator[tuple[str, RunningGateway, Path]]:
    """A server's URL, a gateway that follows its events, and the gateway's access log."""
    ports = free_port(), free_port()
    log = tmp_path / "access.log"
    with process(model_directory, "--served-model-name", "m", "--kv-events-topic", "kv", *events_flags(*ports)) as (
        _,
        url,
    ):
        follow = ["--kv-events", f"tcp://*:{ports[0]}", "--kv-replay", f"tcp://*:{ports[1]}"]
        exact = ["--policy", "prefix_exact", "--tokenizer", str(model_directory), "--access-log", str(log)]
        gateway = RunningGateway([], "--worker", url, *follow, *exact)
        try:
            gateway.wait_available(1)
            yield url, gateway, log
        finally:
            gateway.close()


def test_what_the_gateway_predicts_is_what_the_server_reports(followed: tuple[str, RunningGateway, Path]) -> None:
    """The prompt is first sent past the gateway, so that only events can tell it what the server holds."""
    url, gateway, log = followed
    answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60)
    assert cached_tokens(answer) == 0
    num_tokens = answer.json()["usage"]["prompt_tokens"]
    assert num_tokens % BLOCK == 1, "all but the last token are whole blocks, which is what events tell of"

    def record() -> dict[str, Any]:
        name = uuid.uuid4().hex
        sent = gateway.client.post("/v1/chat/completions", json=BODY, headers={"X-Request-ID": name})
        assert cached_tokens(sent) == num_tokens - 1
        return eventually(lambda: logged(log, name), "the access log")  # type: ignore[no-any-return]

    found = eventually(lambda: (line := record()).get("predicted_cached_tokens") and line, "the events to be followed")
    assert found["predicted_cached_tokens"] == found["reported_cached_tokens"] == num_tokens - 1


def logged(log: Path, request_id: str) -> dict[str, Any] | None:
    lines = map(json.loads, log.read_text().splitlines() if log.exists() else [])
    return next((line for line in lines if line["request_id"] == request_id), None)


def test_events_are_published_until_the_server_has_stopped(model_directory: Path) -> None:
    """What is computed just before the end is heard of, and the addresses are free again for the next server."""
    ports = free_port(), free_port()
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.connect(f"tcp://127.0.0.1:{ports[0]}")
        with process(model_directory, *events_flags(*ports)) as (running, url):
            body = {"prompt": "water " * 20, "max_tokens": 1}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            running.terminate()
            assert running.wait(30) == 0
        assert subscriber.poll(5000), "nothing was published"
        topic, number, _ = subscriber.recv_multipart()
        assert (topic, int.from_bytes(number, "big")) == (b"", 0)
    for port in ports:
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))


@pytest.mark.parametrize("which", ["events", "replay"])
def test_a_taken_address_is_said_before_the_model_is_loaded(which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        ports = (port, free_port()) if which == "events" else (free_port(), port)
        ended = failed_start(Path("/no/such/model"), *events_flags(*ports))
    assert f"cannot publish KV events on tcp://127.0.0.1:{port}: Address already in use" in ended


def test_a_missing_pyzmq_is_said_in_a_sentence(model_directory: Path) -> None:
    hidden = "import sys; sys.modules['zmq'] = None; from caudex.cli import main; main()"
    command = [sys.executable, "-c", hidden, *SERVE[3:], "--model", str(model_directory)]
    said = words_of([*command, "--kv-events-endpoint", "tcp://127.0.0.1:0"])
    assert "pip install 'caudex[events]'" in said


def test_a_replay_address_alone_is_refused(model_directory: Path) -> None:
    said = failed_start(model_directory, "--kv-events-replay-endpoint", "tcp://127.0.0.1:5558")
    assert "kv_events_replay_endpoint is 'tcp://127.0.0.1:5558' but there is no kv_events_endpoint" in said


def failed_start(model: Path, *options: str) -> str:
    return words_of([*SERVE, "--model", str(model), *options])


def words_of(command: list[str]) -> str:
    """What a command that must fail says, which must be no traceback."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr
