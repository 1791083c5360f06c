"""Clients that leave: their blocks come back, and nobody else notices."""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket
from urllib.parse import urlsplit

import pytest

from caudex.engine.types import EngineStats


def idle(stats: EngineStats) -> bool:
    return stats.num_requests_running == stats.num_requests_waiting == stats.num_pinned_blocks == 0


def send(server, body: dict, path: str = "/v1/completions") -> socket.socket:
    """A connection on which a request has been sent and nothing read."""
    parts = urlsplit(server.url)
    data = json.dumps(body).encode()
    connection = socket.create_connection((parts.hostname, parts.port), timeout=30)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_aborts_the_request(fresh_server, stream: bool) -> None:
    with fresh_server(num_blocks=128) as server:
        body = {"prompt": "leave me", "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}
        connection = send(server, body)
        if stream:
            connection.recv(100)
        else:
            server.settled(lambda stats: stats.num_requests_running == 2)
        connection.close()
        stats = server.settled(idle)
        assert stats.requests_finished.get("abort", 0) == 2
        assert stats.generation_tokens < 2 * 400


def test_leaving_while_waiting_in_the_queue(fresh_server) -> None:
    with fresh_server(max_num_seqs=1) as server:
        running = send(server, {"prompt": "first", "max_tokens": 400, "ignore_eos": True, "stream": True})
        running.recv(100)
        waiting = send(server, {"prompt": "second", "max_tokens": 400, "ignore_eos": True})
        server.settled(lambda stats: stats.num_requests_waiting == 1)
        waiting.close()
        server.settled(lambda stats: stats.num_requests_waiting == 0 and stats.num_requests_running == 1)
        running.close()
        server.settled(idle)


def test_leaving_before_the_body_is_whole(server) -> None:
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.http.get("/health").status_code == 200
    server.settled(idle)


def test_two_hundred_random_requests_on_a_pool_too_small_for_two(fresh_server, greedy) -> None:
    """Prompts of up to 20 blocks in a pool of 24; a third of the clients leave. Whoever stays gets the right answer."""
    rng = random.Random(20)
    shared = [[rng.randrange(256) for _ in range(120)] for _ in range(3)]

    def prompt() -> list[int]:
        head = rng.choice(shared)[: rng.randrange(8, 120)]
        return head + [rng.randrange(256) for _ in range(rng.randrange(1, 40))]

    jobs = [(prompt(), rng.randrange(1, 12), rng.random()) for _ in range(200)]

    with fresh_server(num_blocks=24, max_num_batched_tokens=64) as server:

        def ask(job: tuple[list[int], int, float]) -> None:
            ids, length, luck = job
            body = {"prompt": ids, "max_tokens": length, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            if luck < 0.35:
                with send(server, body | {"stream": luck < 0.2}) as connection:
                    if luck < 0.1:
                        connection.recv(1)
                return
            answer = server.post("/v1/completions", **body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == greedy(ids, length)

        with concurrent.futures.ThreadPoolExecutor(12) as clients:
            for done in [clients.submit(ask, job) for job in jobs]:
                done.result()
        stats = server.settled(idle)
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks == 24
        assert sum(stats.requests_finished.values()) <= 200
        assert server.http.get("/health").status_code == 200
