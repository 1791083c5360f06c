"""Tenants, their limits, and queues."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .conftest import RunningGateway, SmallWorker, chat_body, eventually

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


def test_a_response_is_its_tenants_own(tenants_file: str, two_workers: list[SmallWorker], start_gateway: Start) -> None:
    gateway = start_gateway(two_workers, "--tenants", tenants_file)

    def respond(name: str, body: str) -> httpx.Response:
        return gateway.client.post("/v1/responses", content=body, headers=key(name))

    first = respond("alice", '{"input": "x"}').json()["id"]
    assert respond("alice", json.dumps({"input": "y", "previous_response_id": first})).status_code == 200
    for stolen in (
        json.dumps({"input": "y", "previous_response_id": first}),
        f'{{"previous\\u005fresponse_id": "{first}", "input": "y"}}',
        f'{{"previous_response_id": null, "previous_response_id": "{first}"}}',
    ):
        assert respond("carol", stolen).status_code == 404
    assert gateway.client.get(f"/v1/responses/{first}", headers=key("carol")).status_code == 404
    assert gateway.client.get(f"/v1/responses/{first}", headers=key("alice")).status_code == 200
    assert sum(worker.stats()["requests"] for worker in two_workers) == 2
