"""What a gateway costs: latency it adds, streamed requests it carries, what an open stream weighs, and how soon work is
cancelled when its client leaves; side by side with other routers.

    python benchmarks/gateway.py [--peers PYTHON] [--only throughput|streams|decision] [--json FILE]

Starts two backends that answer at once with five events, Caudex's gateway, and, where the interpreter PYTHON has them,
`sglang-router` and `vllm-router` with their cache-aware policies. Everything runs on this machine, so backends and
client take their share of the cores: compare within one run. Prompts share their first half; "cold" ones do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from caudex.bench.local import free_port

BACKEND = Path(__file__).with_name("gateway_backend.py")
SCENES = ((4_096, 1, False), (4_096, 32, False), (32_768, 32, False), (32_768, 32, True))
"""Bytes of prompt, connections, cold."""
CANCEL_PATIENCE = 5.0
MANY_WORKERS = 64


def requests_for(size: int, cold: bool, count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)

    def text(length: int) -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz      ", k=length))

    system = text(size // 2)
    bodies = []
    for _ in range(count):
        messages = [
            {"role": "system", "content": text(size // 2) if cold else system},
            {"role": "user", "content": text(size // 2)},
        ]
        bodies.append(json.dumps({"model": "m", "stream": True, "messages": messages}).encode())
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: "
    return [f"{head}{len(body)}\r\n\r\n".encode() + body for body in bodies]


class Connection(asyncio.Protocol):
    """Sends one request after another, and notes how long each took."""

    def __init__(self, requests: Iterator[bytes], seconds: list[float], done: asyncio.Future[None]) -> None:
        self.requests, self.seconds, self.done = requests, seconds, done

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        request = next(self.requests, None)
        if request is None:
            self.finish(None)
            return
        self.tail = b""
        self.began = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-64:]
        if self.tail.endswith(b"0\r\n\r\n"):
            self.seconds.append(time.perf_counter() - self.began)
            self.send()

    def connection_lost(self, error: Exception | None) -> None:
        self.finish(ConnectionError("the router closed a connection"))

    def finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
                self.transport.close()
            else:
                self.done.set_exception(error)


async def load(port: int, connections: int, requests: list[bytes], seconds: float) -> dict[str, float]:
    times: list[float] = []
    deadline = time.perf_counter() + seconds

    def until_deadline() -> Iterator[bytes]:
        i = 0
        while time.perf_counter() < deadline:
            yield requests[i % len(requests)]
            i += 1

    loop = asyncio.get_running_loop()
    stream, began = until_deadline(), time.perf_counter()
    futures = [loop.create_future() for _ in range(connections)]
    for done in futures:
        await loop.create_connection(lambda done=done: Connection(stream, times, done), "127.0.0.1", port)
    await asyncio.gather(*futures)
    elapsed = time.perf_counter() - began
    ordered = sorted(times)
    return {
        "requests_per_second": len(times) / elapsed,
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))] * 1e3,
    }


def commands(backends: list[int], peers: str | None) -> dict[str, tuple[list[str], int]]:
    urls = [f"http://127.0.0.1:{port}" for port in backends]
    port = free_port()
    workers = [part for url in urls for part in ("--worker", url)]
    options = ["--port", str(port), "--log-level", "warning", "--max-concurrency", "2000"]
    caudex = [sys.executable, "-m", "caudex", "route", *workers, *options]
    found = {"caudex": (caudex, port)}
    if peers is not None:
        folder = Path(peers).parent
        for name, start in (
            ("sglang-router", [peers, "-m", "sglang_router.launch_router", "--prometheus-host", "127.0.0.1"]),
            ("vllm-router", [str(folder / "vllm-router")]),
        ):
            port = free_port()
            options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
            found[name] = ([*start, *options, "--policy", "cache_aware", "--worker-urls", *urls], port)
    return found


def wait_until_it_answers(port: int, request: bytes) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(request)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
                if answer.endswith(b"0\r\n\r\n"):
                    break
            if answer.startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.2)
    raise RuntimeError(f"nothing answers on port {port}")


def memory_mb(pid: int) -> float:
    """Resident memory of a process and its children."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(entry.name) == pid or int(fields[1]) == pid:
                    total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total / 1e6


async def hold_streams(port: int, pid: int | None, request: bytes, count: int) -> dict[str, Any]:
    """Opens so many streams that stay open: what each weighs, and how long another request takes meanwhile."""
    held = with_header(request, b"x-hold: 1")
    before, began = memory_mb(pid) if pid else 0.0, time.perf_counter()
    streams = await asyncio.gather(*[first_event(port, held) for _ in range(count)])
    opened = time.perf_counter() - began
    after = memory_mb(pid) if pid else 0.0
    row = await load(port, 1, [request], 2.0)
    for writer in streams:
        writer.close()
    return {
        "open_streams": count,
        "seconds_to_open": opened,
        "kb_a_stream": (after - before) * 1e3 / count if pid else None,
        "p50_ms": row["p50_ms"],
    }


async def leave_streams(port: int, backends: list[int], request: bytes, count: int, times: int) -> dict[str, Any]:
    """With so many streams open: milliseconds from a client closing its connection to the backend seeing its own
    closed, one client after another, and then for the last of all when all leave at once. Nothing further is tried once
    that takes more than CANCEL_PATIENCE."""
    held = with_header(request, b"x-hold: 1")
    others = await asyncio.gather(*[first_event(port, held) for _ in range(count - 1)])
    try:
        delays = [await milliseconds_to_cancel(backends, [await first_event(port, held)]) for _ in range(times)]
        last = await milliseconds_to_cancel(backends, [*others, await first_event(port, held)])
    except TimeoutError:
        return {"open_streams": count, "not_cancelled_after_ms": CANCEL_PATIENCE * 1e3}
    finally:
        for writer in others:
            writer.close()
    return {
        "open_streams": count,
        "median_ms_to_cancel": statistics.median(delays),
        "longest_ms_to_cancel": max(delays),
        "ms_to_cancel_all_at_once": last,
    }


async def milliseconds_to_cancel(backends: list[int], writers: Sequence[asyncio.StreamWriter]) -> float:
    """From these clients' leaving to the last of their streams being closed; TimeoutError after CANCEL_PATIENCE."""
    seen = len(await closed_at(backends))
    left = time.monotonic()
    for writer in writers:
        writer.transport.abort()
    while len(closed := await closed_at(backends)) < seen + len(writers):
        if time.monotonic() - left > CANCEL_PATIENCE:
            raise TimeoutError
        await asyncio.sleep(0.005)
    return (max(closed) - left) * 1e3


def with_header(request: bytes, header: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\n" + header + b"\r\n", 1)


async def first_event(port: int, request: bytes) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await reader.readuntil(b"word0")
    return writer


async def closed_at(backends: list[int]) -> list[float]:
    times: list[float] = []
    for port in backends:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /closed HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        times += json.loads(await reader.readexactly(int(head.rsplit(b":", 1)[1])))
        writer.close()
    return times


def decision_us(port: int) -> float:
    """Mean microseconds of a decision, by the gateway's own account."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    name = "caudex_gateway_decision_seconds"
    figures = dict(line.split() for line in page.splitlines() if line.startswith(name) and "{" not in line)
    return float(figures[f"{name}_sum"]) / float(figures[f"{name}_count"]) * 1e6


class Bench:
    """The backends, the routers in front of them, and the rows measured so far."""

    def __init__(self, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.seconds = args.seconds
        self.rows: list[dict[str, Any]] = []
        self.backends = [free_port(), free_port()]
        for port in self.backends:
            self._start([sys.executable, str(BACKEND), str(port)])
        self.targets: dict[str, tuple[int, int | None]] = {"direct": (self.backends[0], None)}
        warm = requests_for(256, False, 1, 0)[0]
        wait_until_it_answers(self.backends[0], warm)
        for name, (command, port) in commands(self.backends, args.peers).items():
            try:
                process = self._start(command)
                wait_until_it_answers(port, warm)
                self.targets[name] = (port, process.pid)
            except (OSError, RuntimeError) as error:
                print(f"{name}: left out ({error})", file=sys.stderr)

    def throughput(self, size: int, connections: int, cold: bool) -> None:
        requests = requests_for(size, cold, 4_000 if cold else 64, size)
        for name, (port, pid) in self.targets.items():
            row = asyncio.run(load(port, connections, requests, self.seconds))
            row["memory_mb"] = memory_mb(pid) if pid else None
            self._note({"router": name, "prompt_bytes": size, "connections": connections, "cold": cold, **row})

    def streams(self, counts: Sequence[int], leavings: int) -> None:
        request = requests_for(4_096, False, 1, 0)[0]
        for name, (port, pid) in self.targets.items():
            self._note({"router": name, **asyncio.run(hold_streams(port, pid, request, max(counts)))})
            for count in counts:
                row = asyncio.run(leave_streams(port, self.backends, request, count, leavings))
                self._note({"router": name, **row})

    def decision(self) -> None:
        """Of Caudex alone: a decision under full load, with two workers, and with many in one process."""
        port = self.targets["caudex"][0]
        self._note({"router": "caudex", "workers": len(self.backends), "decision_us": decision_us(port)})
        backends = [free_port() for _ in range(MANY_WORKERS)]
        self._start([sys.executable, str(BACKEND), *map(str, backends)])
        command, port = commands(backends, None)["caudex"]
        self._start(command)
        requests = requests_for(32_768, False, 64, 0)
        wait_until_it_answers(port, requests[0])
        row = asyncio.run(load(port, 32, requests, self.seconds))
        figures = {"workers": MANY_WORKERS, "prompt_bytes": 32_768, "decision_us": decision_us(port)}
        self._note({"router": "caudex", **figures, **row})

    def _note(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter in whose environment the peers are installed")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--only", choices=["throughput", "streams", "decision"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        bench = Bench(args, stack)
        if args.only in (None, "throughput"):
            for scene in SCENES:
                bench.throughput(*scene)
        if args.only in (None, "streams"):
            bench.streams((1, 100, 1_000), 100)
        bench.decision()
    if args.json:
        args.json.write_text(json.dumps(bench.rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
