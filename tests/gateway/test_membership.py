"""Workers that come from a file, and TLS."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from caudex.gateway.discovery import FileSource
from caudex.gateway.upstream_pool import parse_endpoint
from caudex.gateway.worker_metrics import parse_worker_metrics

from .conftest import PATIENCE, RunningGateway, SmallWorker, chat_body

Start = Callable[..., RunningGateway]


def test_a_workers_file_is_watched(tmp_path: Path, two_workers: list[SmallWorker], start_gateway: Start) -> None:
    path = tmp_path / "workers"
    path.write_text(f"# the fleet\n{two_workers[0].url}\n")
    gateway = start_gateway([], "--workers-file", str(path))
    gateway.wait_available(1)
    path.write_text(f"{two_workers[0].url}\n{two_workers[1].url}  # new\n")
    gateway.wait_available(2)
    path.write_text(f"{two_workers[1].url}\nnot an address at all:::\n")
    assert gateway.chat("x").status_code == 200
    path.write_text(f"{two_workers[1].url}\n")
    gateway.wait_available(1)
    path.unlink()
    before = two_workers[1].stats()["requests"]
    assert all(gateway.chat(f"p{i}").status_code == 200 for i in range(5))
    assert two_workers[1].stats()["requests"] == before + 5


def test_a_workers_file_that_is_being_written_drains_nobody(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    source = FileSource(path)
    looks = [
        ("http://a:8000\nhttp://b:8001\n", {"http://a:8000", "http://b:8001"}),
        ("", {"http://a:8000", "http://b:8001"}),
        ("http://a:8000\nhttp://b:80", {"http://a:8000", "http://b:8001"}),
        ("http://a:8000\nhttp://b:8001\nhttp://c:8002\n", {"http://a:8000", "http://b:8001"}),
        ("http://a:8000\nhttp://b:8001\nhttp://c:8002\n", {"http://a:8000", "http://b:8001", "http://c:8002"}),
        ("http://c:8002\n", {"http://a:8000", "http://b:8001", "http://c:8002"}),
        ("http://c:8002\n", {"http://c:8002"}),
    ]
    for text, expected in looks:
        path.write_text(text)
        assert asyncio.run(source.addresses()) == expected


def test_workers_by_name(two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway([], "--workers-dns", f"localhost:{two_workers[0].port}")
    gateway.wait_available(1)
    assert gateway.chat("x").status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make a certificate")
def test_tls(tmp_path: Path, start_worker: Callable[[], SmallWorker], start_gateway: Start) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    subprocess.run([*command, *names], check=True, capture_output=True)
    context = ssl.create_default_context(cafile=cert)
    gateway = start_gateway([start_worker()], "--tls-cert", cert, "--tls-key", key, scheme="https", verify=context)
    assert gateway.chat("x").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{gateway.url}/v1/chat/completions", json=chat_body("x"), timeout=PATIENCE)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://Host:8000/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("https://host/base/v1/", "https://host/base"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_are_normalised(address: str, url: str) -> None:
    assert parse_endpoint(address).url == url


@pytest.mark.parametrize("address", ["", "ftp://host", "http://host:port", "http://user:pw@host", "http://h/?q"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="worker address"):
        parse_endpoint(address)


PAGES = {
    "vllm": """# HELP x
vllm:num_requests_running{model_name="m",engine="0"} 3.0
vllm:num_requests_running{model_name="m",engine="1"} 2.0
vllm:num_requests_waiting{model_name="m"} 7.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",x="y"} 1.0
process_start_time_seconds 1.5e+09
""",
    "sglang": """sglang:num_running_reqs{model_name="m"} 5
sglang:num_queue_reqs{model_name="m"} 7
sglang:token_usage{model_name="m"} 0.25
sglang:max_total_num_tokens{model_name="m"} 16000
process_start_time_seconds 1.5e+09
""",
    "caudex": """caudex:num_requests_running{model_name="m"} 5.0
caudex:num_requests_waiting{model_name="m"} 7.0
caudex:kv_cache_usage_perc{model_name="m"} 0.25
caudex:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="1000"} 1.0
caudex:http_requests_created{path="/health"} 1.6e+09
caudex:time_to_first_token_seconds_created{model_name="m"} 1.5e+09
""",
}


@pytest.mark.parametrize("engine", PAGES)
def test_the_figures_of_every_engine_are_read(engine: str) -> None:
    figures = parse_worker_metrics(PAGES[engine])
    load = figures.load
    assert (load.running, load.waiting, load.kv_usage, load.capacity_tokens) == (5.0, 7.0, 0.25, 16_000.0)
    assert figures.started_at == 1.5e9


def test_a_page_without_figures_says_nothing() -> None:
    figures = parse_worker_metrics("<html>\nllamacpp:requests_processing NaNsense\n")
    assert figures.load.running is None
    assert figures.started_at is None
    assert parse_worker_metrics("llamacpp:requests_processing 2\n").load.running == 2.0
