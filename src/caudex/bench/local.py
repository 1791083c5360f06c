"""A `caudex serve` of our own to measure, as a process of its own on a free port of this machine."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO


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

    def cpu_seconds(self) -> float | None:
        """Processor time that the process and its living descendants have used; None where the system does not tell."""
        if not Path("/proc/self/stat").exists():
            return None
        return sum(cpu_seconds(pid) for pid in process_tree(self.process.pid))

    def pause(self) -> None:
        """Take the processor from all of its processes until `resume`: an idle server may still poll."""
        for pid in process_tree(self.process.pid):
            send_if_alive(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in process_tree(self.process.pid):
            send_if_alive(pid, signal.SIGCONT)


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants that live now."""
    children: list[str] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += thread.read_text().split()
    return [pid, *(descendant for child in children for descendant in process_tree(int(child)))]


def resident_peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def caudex_command(options: Sequence[str], port: int) -> list[str]:
    return [sys.executable, "-m", "caudex.cli", "serve", "--port", str(port), "--log-level", "warning", *options]


@contextlib.contextmanager
def running(
    command: Sequence[str], port: int, *, environment: Mapping[str, str] | None = None, timeout: float = 600.0
) -> Iterator[LocalServer]:
    """Start a server that will answer on `port`, yield it when `/health` is 200, and stop it afterwards.

    What it prints goes to a file. Rejected: a pipe; once it is full, a server that logs every request stands still.

    Raises:
        RuntimeError: the process ended, or was not healthy within `timeout` seconds; what it printed is quoted.
    """
    started = time.perf_counter()
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        ) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process, said, timeout)
            yield LocalServer(url, process, time.perf_counter() - started)
        finally:
            stop(process)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], said: IO[bytes], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not healthy(url):
        if process.poll() is not None:
            said.seek(0)
            words = said.read()[-2000:].decode(errors="replace").strip()
            raise RuntimeError(f"the server ended with status {process.returncode}: {words}")
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
    """Ask the process to stop, also if it is paused; after ten seconds insist. Descendants it leaves are killed."""
    family = process_tree(process.pid)
    if process.poll() is None:
        process.terminate()
        for pid in family:
            send_if_alive(pid, signal.SIGCONT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
    for pid in family[1:]:
        send_if_alive(pid, signal.SIGKILL)


def send_if_alive(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def free_port(in_a_row: int = 1) -> int:
    """A port that nobody listens on now; the first of several in a row, if that many are asked for.

    It lies below those that kernels give to outgoing connections (from 32,768 on Linux, from 49,152 elsewhere), so that
    none of them takes it before it is listened on, or while a server starts again.
    """
    for port in random.Random().sample(range(20_000, 32_768 - in_a_row), 100):
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for each in range(port, port + in_a_row):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port
    raise OSError("of 100 ports between 20000 and 32767 none is free on 127.0.0.1")
