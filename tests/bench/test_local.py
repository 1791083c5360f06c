"""A server of one's own as a process: it is never held up by what it prints, can be paused, and is gone afterwards."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import contenders
from caudex.bench.local import LocalServer, free_port, process_tree, running

TALKER = """
    import subprocess, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Talker(BaseHTTPRequestHandler):
        def do_GET(self):
            print("x" * 500_000, flush=True)
            self.send_response(200)
            self.end_headers()

    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Talker).serve_forever()
"""


@pytest.fixture
def talker(tmp_path: Path) -> Iterator[LocalServer]:
    """A server that prints half a megabyte at every request, with a child that is always busy."""
    script, port = tmp_path / "talker.py", free_port()
    script.write_text(textwrap.dedent(TALKER))
    with running([sys.executable, str(script), str(port)], port) as server:
        yield server


def test_a_server_that_prints_much_still_answers(talker: LocalServer) -> None:
    for _ in range(5):
        with urllib.request.urlopen(f"{talker.url}/health", timeout=30) as answer:
            assert answer.status == 200


def test_a_paused_server_and_its_children_get_no_processor(talker: LocalServer) -> None:
    before = talker.cpu_seconds()
    if before is None:
        pytest.skip("this system does not tell")
    while (talker.cpu_seconds() or 0.0) < before + 0.1:
        pass
    talker.pause()
    asyncio.run(asyncio.sleep(0.1))
    paused = talker.cpu_seconds()
    asyncio.run(asyncio.sleep(0.3))
    assert talker.cpu_seconds() == paused
    talker.resume()
    while (talker.cpu_seconds() or 0.0) == paused:
        pass


def test_a_paused_server_and_its_children_end_with_the_context(tmp_path: Path) -> None:
    script, port = tmp_path / "talker.py", free_port()
    script.write_text(textwrap.dedent(TALKER))
    with running([sys.executable, str(script), str(port)], port) as server:
        family = process_tree(server.process.pid)
        server.pause()
    assert len(family) > 1
    while not all(ended(pid) for pid in family):
        pass


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits for nothing but its parent."""
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_server_that_stands_still_is_noticed(talker: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "SILENT_SECONDS", 1.5)
    talker.pause()
    asyncio.run(asyncio.wait_for(contenders.wait_until_silent(talker), 60))
