"""Real processes: small workers, and `caudex route` in front of them."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from caudex.bench.local import free_port

WORKER = Path(__file__).with_name("small_worker.py")
PATIENCE = 30.0
"""How long to wait for something that must happen; on a loaded machine things take their time."""


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """The condition's first true value; fails, saying what was waited for, when patience ends."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, OSError):
            if value := condition():
                return value
        time.sleep(0.02)
    raise AssertionError(f"waited {PATIENCE} s in vain for: {what}")


class SmallWorker:
    """Is launched, and up some time later: who needs it waits for it, as a gateway does before a test begins."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.launch()

    def launch(self) -> None:
        self.process = subprocess.Popen([sys.executable, str(WORKER), str(self.port)])

    def start(self) -> None:
        """Again, after `kill`."""
        self.launch()
        eventually(lambda: httpx.get(f"{self.url}/health").status_code == 200, "the worker to start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stats(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/stats", timeout=5).json()  # type: ignore[no-any-return]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        self.kill()


class RunningGateway:
    """`caudex route` as a process; `flags` as on the command line."""

    def __init__(
        self, workers: list[SmallWorker], *flags: str, scheme: str = "http", verify: ssl.SSLContext | bool = True
    ) -> None:
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        addresses = [part for worker in workers for part in ("--worker", worker.url)]
        command = [sys.executable, "-m", "caudex", "route", *addresses, "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=verify)
        eventually(self.answers, "the gateway to start")
        if workers:
            self.wait_available(len(workers))

    def answers(self) -> bool:
        return self.client.get("/health").status_code in (200, 503)

    def available(self) -> int:
        return int(self.client.get("/health").json()["available"])

    def wait_available(self, count: int) -> None:
        eventually(lambda: self.available() == count, f"{count} workers to be available")

    def chat(self, content: str, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=chat_body(content, **fields), headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if (
                line.startswith(name)
                and line[len(name)] in "{ "
                and all(f'{k}="{v}"' in line for k, v in labels.items())
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def close(self, *, gently: bool = False) -> None:
        self.client.close()
        if gently:
            self.process.send_signal(signal.SIGINT)
        else:
            self.process.kill()
        assert self.process.wait(timeout=PATIENCE) == 0 or not gently


def chat_body(content: str, *, stream: bool = False, system: str = "", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    return {"model": "m", "stream": stream, "messages": [*messages, {"role": "user", "content": content}], **fields}


def expected_text(content: str, words: int = 3) -> str:
    return "".join(f"{content[:20]}-{i} " for i in range(words))


@pytest.fixture
def start_worker() -> Iterator[Callable[[], SmallWorker]]:
    with contextlib.ExitStack() as stack:

        def start() -> SmallWorker:
            worker = SmallWorker()
            stack.callback(worker.close)
            return worker

        yield start


def gateway_starter(stack: contextlib.ExitStack) -> Callable[..., RunningGateway]:
    def start(workers: list[SmallWorker], *flags: str, **options: Any) -> RunningGateway:
        gateway = RunningGateway(workers, "--log-level", "warning", *flags, **options)
        stack.callback(gateway.close)
        return gateway

    return start


@pytest.fixture
def start_gateway() -> Iterator[Callable[..., RunningGateway]]:
    with contextlib.ExitStack() as stack:
        yield gateway_starter(stack)


@pytest.fixture
def two_workers(start_worker: Callable[[], SmallWorker]) -> list[SmallWorker]:
    return [start_worker(), start_worker()]
