"""Clients that stop reading, and read on later: they get every character, and what waits for them is bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from urllib.parse import urlsplit

from caudex.engine.types import RequestOutput
from caudex.server.generation import MAX_APART, Inbox

from .test_stream import dechunk

CHOICES, TOKENS = 48, 400


class NoTimer:
    def observe(self, choice: int, output: RequestOutput, made_at: float) -> None:
        pass


def output(token: int, **fields) -> RequestOutput:
    return RequestOutput("r", [token], chr(65 + token % 26), 1, 0, token + 1, **fields)


def filled(outputs: list[tuple[int, RequestOutput]]) -> list:
    """What a reader takes from an inbox that was filled before it came."""

    async def fill_and_take() -> list:
        inbox = Inbox(NoTimer())
        for choice, made in outputs:
            inbox.put(choice, made, 0.0)
        return await inbox.take()

    return asyncio.run(fill_and_take())


def test_what_waits_is_bounded_and_whole() -> None:
    items = filled([(number % 3, output(number)) for number in range(3000)])
    assert len(items) <= MAX_APART + 3
    for choice in range(3):
        own = [item.output for item in items if item.choice == choice]
        assert [token for made in own for token in made.token_ids] == list(range(choice, 3000, 3))
        assert "".join(made.text for made in own) == "".join(chr(65 + n % 26) for n in range(choice, 3000, 3))
        assert own[-1].num_output_tokens == 3000 - 2 + choice


def test_outputs_stay_apart_for_a_reader_that_is_a_little_late() -> None:
    items = filled([(0, output(number)) for number in range(MAX_APART)])
    assert [item.output.token_ids for item in items] == [[number] for number in range(MAX_APART)]


def test_an_end_is_kept_and_a_failure_stays_by_itself() -> None:
    made = [(0, output(number)) for number in range(100)]
    assert filled([*made, (0, output(100, finish_reason="length"))])[-1].output.finish_reason == "length"
    *rest, failed = filled([*made, (0, RequestOutput("r", [], "", 1, 0, 100, finish_reason="error", error="no"))])
    assert (failed.output.error, failed.output.token_ids) == ("no", [])
    assert [token for item in rest for token in item.output.token_ids] == list(range(100))


def test_a_client_that_stops_reading_gets_everything_when_it_reads_on(fresh_server) -> None:
    """More text than the sockets between the two hold, so that most of it waits in the server."""
    body = {
        "prompt": "wait for me", "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "n": CHOICES,
        "return_token_ids": True, "seed": 5,
    }  # fmt: skip
    with fresh_server(num_blocks=4096, max_num_seqs=CHOICES) as server:
        asked = server.post("/v1/completions", **body | {"stream": False}).json()["choices"]
        parts = urlsplit(server.url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect((parts.hostname, parts.port))
            data = json.dumps(body).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                + f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            server.settled(lambda stats: stats.requests_finished.get("length", 0) == 2 * CHOICES, seconds=60)
            received = b""
            while piece := client.recv(65536):
                received += piece
    events = dechunk(received.partition(b"\r\n\r\n")[2]).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    texts, tokens = [""] * CHOICES, [[] for _ in range(CHOICES)]
    for event in events[:-2]:
        (choice,) = json.loads(event[6:])["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["token_ids"]
    assert texts == [choice["text"] for choice in asked]
    assert tokens == [choice["token_ids"] for choice in asked]
    assert len(events) < CHOICES * TOKENS, "nothing was joined: the client was not behind"
