"""`caudex serve` as a process: its first words, its signals, its errors."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from caudex.bench.local import free_port, wait_until_healthy
from caudex.engine.config import EngineConfig
from caudex.server.run import Address, listen, listening_socket, serve
from caudex.server.settings import ServerSettings

SERVE = [sys.executable, "-m", "caudex.cli", "serve", "--port", "0", "--num-blocks", "128", "--num-threads", "1"]
LONG = {"prompt": "go on", "max_tokens": 400, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def process(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process and the URL that it prints."""
    command = [*SERVE, "--model", str(model), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            first = running.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", first)
            assert found, first + (running.stderr.read() if running.stderr else "")
            yield running, found[0]
        finally:
            running.kill()


def test_the_curl_line_it_prints_works(model_directory: Path) -> None:
    with process(model_directory) as (running, url):
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(4)]
        assert f"curl {url}/v1/chat/completions" in lines[2]
        body = json.loads(lines[3].strip().removeprefix("-d '").removesuffix("'"))
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0


@pytest.mark.parametrize("setting", ["--weights=int8", "--weights=int4", "--kv-cache-dtype=int8"])
def test_quantized_products_give_the_same_answer_from_the_cache(model_directory: Path, setting: str) -> None:
    body = {"prompt": "a beginning " * 20, "max_tokens": 8, "temperature": 0.0, "logprobs": 2}
    with process(model_directory, setting) as (_, url):
        cold, hot = (httpx.post(f"{url}/v1/completions", json=body, timeout=60).json() for _ in range(2))
    assert hot["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert hot["choices"] == cold["choices"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_requests_finish(model_directory: Path, number: signal.Signals) -> None:
    with process(model_directory) as (running, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.send_signal(number)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert running.wait(30) == 0


def test_a_second_signal_stops_at_once(model_directory: Path) -> None:
    body = LONG | {"n": 128}
    with process(model_directory, "--max-num-seqs", "1") as (running, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.send_signal(signal.SIGINT)
            assert running.stderr is not None
            while "finishing" not in running.stderr.readline():
                pass
            running.send_signal(signal.SIGINT)
            assert "the server gave this request up" in "".join(lines)
        assert running.wait(30) == 0
        assert "Traceback" not in running.stderr.read()


def test_a_signal_closes_idle_connections(model_directory: Path) -> None:
    with process(model_directory) as (running, url), httpx.Client(base_url=url) as client:
        assert client.get("/health").status_code == 200
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0


def test_a_taken_port_is_said_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "caudex.cli", "serve", "--port", port, "--model", "/no/such/model"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_certificate_that_cannot_be_used_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text("no certificate")
    for files, said in (
        ((certificate, key), "certificate.pem"),
        ((certificate, None), "PEM"),
        ((None, key), "key.pem"),
    ):
        with pytest.raises(ValueError, match=said):
            serve(EngineConfig(model="none"), ServerSettings(), Address("127.0.0.1", 0, *files), on_ready=print)


def test_of_two_servers_that_load_side_by_side_one_gets_the_port() -> None:
    with listening_socket(Address(port=0)) as first:
        address = Address(port=first.getsockname()[1])
        with listening_socket(address) as second:
            listen(first, address)
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {address.port}: .*another --port"):
                listen(second, address)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device on this system")
def test_a_log_that_cannot_be_written_stops_nobody(model_directory: Path) -> None:
    port = free_port()
    options = ("--port", str(port), "--model", str(model_directory), "--access-log", "--log-interval", "0.1")
    with Path("/dev/full").open("w") as full, subprocess.Popen([*SERVE, *options], stdout=full, stderr=full) as running:
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}", running, io.BytesIO(), 120)
            for _ in range(3):
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"}, timeout=60)
                assert answer.status_code == 200
            assert running.poll() is None
        finally:
            running.kill()


def test_a_missing_model_is_said_in_a_sentence(tmp_path: Path) -> None:
    ended = subprocess.run([*SERVE, "--model", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert str(tmp_path) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_json_logs_are_one_object_a_line(model_directory: Path) -> None:
    options = ("--log-format", "json", "--access-log", "--log-interval", "0.1")
    command = [*SERVE, "--model", str(model_directory), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stderr is not None
            lines: list[str] = []
            url = None
            while url is None:
                lines.append(running.stderr.readline())
                found = re.search(r"http://127\.0\.0\.1:\d+", lines[-1])
                url = found[0] if found else None
            reader = threading.Thread(target=lambda: lines.extend(running.stderr or []))
            reader.start()
            httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 300}, timeout=60)
            running.send_signal(signal.SIGINT)
            running.wait(30)
            reader.join(10)
        finally:
            running.kill()
    parsed = [json.loads(line) for line in lines if line.startswith("{")]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in parsed)
    assert any("POST /v1/completions" in line["message"] for line in parsed)
    assert any("generated_tokens_per_second" in line for line in parsed)
