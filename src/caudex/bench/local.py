"""A `caudex serve` of our own to measure, as a process of its own on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server process that answers at `url`. `startup` is the seconds from its start to its first healthy answer."""

    url: str
    process: subprocess.Popen[bytes]
    startup: float

    def peak_memory(self) -> int | None:
        """The most memory that the process and its descendants have had resident, in bytes, each at its own peak; None
        where the system does not tell (anything but Linux)."""
        if not Path("/proc/self/status").exists():
            return None
        return sum(resident_peak(pid) for pid in process_tree(self.process.pid))


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants that live now."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(descendant for child in children for descendant in process_tree(int(child)))]


def resident_peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def caudex_command(options: Sequence[str], port: int) -> list[str]:
    return [sys.executable, "-m", "caudex.cli", "serve", "--port", str(port), "--log-level", "warning", *options]


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, *, environment: Mapping[str, str] | None = None, timeout: float = 600.0
) -> Iterator[LocalServer]:
    """Start a server that will answer on `port`, yield it when `/health` is 200, and stop it afterwards.

    Raises:
        RuntimeError: the process ended, or was not healthy within `timeout` seconds; what it printed is quoted.
    """
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
    ) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process, timeout)
            yield LocalServer(url, process, time.perf_counter() - started)
        finally:
            stop(process)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not healthy(url):
        if process.poll() is not None:
            said = process.stdout.read() if process.stdout else b""
            raise RuntimeError(f"the server ended with status {process.returncode}: {said[-2000:].decode().strip()}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the server at {url} was not ready after {timeout:g} s")
        time.sleep(0.1)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to stop; insist after ten seconds."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
