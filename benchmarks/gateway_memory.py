"""Whether a gateway's memory stays flat under traffic that is always new.

    python benchmarks/gateway_memory.py --minutes 60 [--rate 200] [--policy cost] [--json FILE]

Two backends answer at once; eight clients send what would make a careless gateway grow: prompts, sessions, models and
paths nobody has seen before, conversations that go on, responses that build on responses, broken bodies, and clients
that leave in the middle. Resident memory is sampled every ten seconds; the slope is that of a line through the second
half, when the index and all tables have long been full.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from caudex.bench.local import free_port
from gateway import BACKEND, memory_mb, requests_for, wait_until_it_answers

CLIENTS = 8
SAMPLE_SECONDS = 10.0
_RESPONSE_ID = re.compile(rb'"id":"(resp_\d+)"')


class Traffic:
    """Requests as bytes. What is remembered here is bounded too: eight conversations a client."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.letters = "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz      ", k=1_000_000))
        self.conversations: list[list[dict[str, str]]] = []
        self.response_id: str | None = None

    def next(self) -> tuple[str, bytes]:
        """The kind of a request, and the request."""
        kind = self.rng.choices(
            ("new", "goes on", "response", "session", "model", "path", "broken", "leaves"), (25, 10, 45, 5, 4, 4, 4, 3)
        )[0]
        body: dict[str, Any] = {"model": "m", "stream": True}
        target, headers = "/v1/chat/completions", ""
        if kind == "goes on" and self.conversations:
            body["messages"] = self._next_turn()
        elif kind == "response":
            target, body = "/v1/responses", {"model": "m", "input": self.text(), "user": f"u{self.number()}"}
            body["previous_response_id"] = self.response_id if self.rng.random() < 0.5 else None
        else:
            body["messages"] = self._new_conversation()
        if kind == "session":
            headers = f"x-session-id: {self.number()}\r\n"
        if kind == "model":
            body["model"] = f"nobody serves {self.number()}"
        if kind == "path":
            target = f"/v1/x{self.number()}"
        raw = json.dumps(body).encode()
        if kind == "broken":
            raw = raw[: self.rng.randrange(len(raw))] + b"\xff"
        head = f"POST {target} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(raw)}\r\n\r\n"
        return kind, head.encode() + raw

    def number(self) -> int:
        return self.rng.getrandbits(60)

    def text(self) -> str:
        size = int(2 ** self.rng.uniform(8, 15))
        start = self.rng.randrange(len(self.letters) - size)
        return f"{self.number()} {self.letters[start : start + size]}"

    def _new_conversation(self) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.text()}, {"role": "user", "content": self.text()}]
        self.conversations = [*self.conversations[-7:], messages]
        return messages

    def _next_turn(self) -> list[dict[str, str]]:
        messages = self.rng.choice(self.conversations)
        messages += [{"role": "assistant", "content": self.text()}, {"role": "user", "content": self.text()}]
        return messages if len(messages) < 20 else self._new_conversation()


async def client(port: int, seed: int, rate: float, until: float, sent: Counter[str]) -> None:
    """Sends one request after another. A connection that idled too long (the machine slept) is opened anew."""
    traffic = Traffic(seed)
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while time.monotonic() < until and await send(traffic, reader, writer, sent):
                await asyncio.sleep(traffic.rng.expovariate(rate / CLIENTS))
        except (ConnectionError, asyncio.IncompleteReadError):
            sent["connection lost"] += 1
        finally:
            writer.close()


async def send(
    traffic: Traffic, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: Counter[str]
) -> bool:
    """One request; whether the connection is good for another."""
    kind, request = traffic.next()
    writer.write(request)
    sent[kind] += 1
    if kind == "leaves":
        return False
    status, body = await answer(reader)
    sent[f"status {status}"] += 1
    if found := _RESPONSE_ID.search(body):
        traffic.response_id = found[1].decode()
    return status < 400


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """A whole answer, by its length or its last chunk."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        return status, await reader.readexactly(int(length[1]))
    return status, await reader.readuntil(b"0\r\n\r\n")


async def run(port: int, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    until = time.monotonic() + args.minutes * 60
    sent: Counter[str] = Counter()
    began = time.monotonic()
    clients = [asyncio.create_task(client(port, i, args.rate, until, sent)) for i in range(CLIENTS)]
    samples: list[tuple[float, float, int]] = []
    while time.monotonic() < until:
        await asyncio.sleep(SAMPLE_SECONDS)
        samples.append((time.monotonic() - began, memory_mb(pid), num_requests(sent)))
        if len(samples) % 30 == 0:
            print(
                f"{samples[-1][0] / 60:6.1f} min  {samples[-1][1]:7.1f} MB  {num_requests(sent)} requests", flush=True
            )
        for task in clients:
            if task.done():
                task.result()
    await asyncio.gather(*clients)
    return {"samples": samples, "sent": dict(sent), **slope(samples)}


def num_requests(sent: Counter[str]) -> int:
    return sum(count for kind, count in sent.items() if not kind.startswith(("status", "connection")))


def slope(samples: list[tuple[float, float, int]]) -> dict[str, float]:
    seconds, megabytes, requests = np.array(samples[len(samples) // 2 :]).T
    return {
        "first_half_end_mb": float(megabytes[0]),
        "end_mb": float(megabytes[-1]),
        "mb_per_hour": float(np.polyfit(seconds / 3600, megabytes, 1)[0]),
        "bytes_per_request": float(np.polyfit(requests, megabytes * 1e6, 1)[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second, if the machine keeps up")
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        backends, port = [free_port(), free_port()], free_port()
        for backend in backends:
            start(str(BACKEND), str(backend))
        workers = [part for backend in backends for part in ("--worker", f"http://127.0.0.1:{backend}")]
        options = ["--port", str(port), "--policy", args.policy, "--log-level", "error"]
        gateway = start("-m", "caudex", "route", *workers, *options)
        wait_until_it_answers(port, requests_for(256, False, 1, 0)[0])
        report = asyncio.run(run(port, gateway.pid, args))
    print(json.dumps({name: value for name, value in report.items() if name != "samples"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
