"""Two real servers behind the gateway, paused, killed and restarted while clients run.

    python benchmarks/fleet_failures.py [--json FILE]

Needs `caudex serve` and its default model. Clients ask for greedy answers, which are compared with those that a server
gave beforehand: every answer must be right, or end with an error event behind a right beginning, or be an error status.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from caudex.bench.client import Endpoint, ServerError, events, first_model, texts

QUESTIONS = 12
CLIENTS = 6
SYSTEM = "You are a terse assistant. " * 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "caudex", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def server(port: int) -> subprocess.Popen[bytes]:
    return start("serve", "--port", str(port), "--num-blocks", "400")


def available(port: int) -> int:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return int(json.load(answer).get("available", 1))
    return 0


async def until_available(port: int, count: int, seconds: float) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if await asyncio.to_thread(available, port) >= count:
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    raise TimeoutError(f"port {port} has not {count} available after {seconds} s")


async def ask(endpoint: Endpoint, question: int) -> tuple[str, str]:
    """How it ended ("whole", or what the error said) and the text until then."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Count from {question} upward."},
    ]
    body = {"model": endpoint.model, "messages": messages, "max_tokens": 16, "temperature": 0, "stream": True}
    pieces: list[str] = []
    try:
        async for _, chunk in events(endpoint, "/v1/chat/completions", body):
            pieces += texts(chunk)
    except ServerError as error:
        return str(error), "".join(pieces)
    return "whole", "".join(pieces)


def verdict(ending: str, text: str, right: str) -> str:
    if ending == "whole":
        return "right" if text == right else "WRONG"
    if ending.startswith("error in the stream"):
        return "told" if right.startswith(text) else "WRONG"
    return "refused" if ending.startswith("status 5") else f"SILENT CUT: {ending}"


async def play(ports: list[int], gateway: int, servers: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    direct = Endpoint(f"http://127.0.0.1:{ports[0]}", "")
    model = await first_model(direct)
    right = [(await ask(Endpoint(direct.url, model), i))[1] for i in range(QUESTIONS)]
    endpoint = Endpoint(f"http://127.0.0.1:{gateway}", model)
    verdicts: Counter[str] = Counter()
    slowest, stop = 0.0, False

    async def client(first: int) -> None:
        nonlocal slowest
        i = first
        while not stop:
            began = time.monotonic()
            ending, text = await ask(endpoint, i % QUESTIONS)
            slowest = max(slowest, time.monotonic() - began)
            verdicts[verdict(ending, text, right[i % QUESTIONS])] += 1
            i += CLIENTS

    clients = [asyncio.create_task(client(i)) for i in range(CLIENTS)]
    await asyncio.sleep(5)
    os.kill(servers[1].pid, signal.SIGSTOP)
    await asyncio.sleep(10)
    os.kill(servers[1].pid, signal.SIGCONT)
    resumed = await until_available(gateway, 2, 60)
    await asyncio.sleep(3)
    servers[0].kill()
    servers[0].wait()
    await asyncio.sleep(3)
    servers[0] = server(ports[0])
    await until_available(ports[0], 1, 300)
    restarted = await until_available(gateway, 2, 60)
    await asyncio.sleep(3)
    stop = True
    await asyncio.gather(*clients)
    return {
        "requests": verdicts.total(),
        "verdicts": dict(verdicts),
        "slowest_seconds": slowest,
        "seconds_to_traffic_after_resume": resumed,
        "seconds_to_traffic_after_restart": restarted,
    }


async def run() -> dict[str, Any]:
    ports, gateway = [free_port(), free_port()], free_port()
    servers = [server(port) for port in ports]
    workers = [part for port in ports for part in ("--worker", f"http://127.0.0.1:{port}")]
    router = start("route", *workers, "--port", str(gateway))
    try:
        await until_available(gateway, 2, 300)
        return await play(ports, gateway, servers)
    finally:
        for process in (router, *servers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = asyncio.run(run())
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    bad = [name for name in report["verdicts"] if name not in ("right", "told", "refused")]
    sys.exit(f"not as promised: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
