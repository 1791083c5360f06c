"""What every store promises, and what each adds."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from caudex.tiers.disk_store import DiskStore
from caudex.tiers.memory_store import MemoryStore
from caudex.tiers.store import BlockStore
from caudex.tiers.valkey_store import ValkeyStore

from .conftest import ValkeyServer, a_key

MakeStore = Callable[[], BlockStore]


@pytest.fixture(params=["memory", "disk", "valkey"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStore:
    if request.param == "memory":
        return MemoryStore(2**20)
    if request.param == "disk":
        return DiskStore(tmp_path / "kv", 2**20)
    server: ValkeyServer = request.getfixturevalue("valkey")
    return ValkeyStore(server.url)


def test_gives_back_what_was_put(store: BlockStore) -> None:
    keys = [a_key(number) for number in range(6)]
    store.put_many([(key, key * 10) for key in keys if key != keys[3]])
    assert store.get_many(keys) == [None if key == keys[3] else key * 10 for key in keys]
    assert [store.count_prefix(keys[start:]) for start in (0, 3, 4)] == [3, 0, 2]
    assert store.count_prefix([]) == 0
    store.put_many([(keys[0], b"other"), (keys[1], b"")])
    assert store.get_many(keys[:2]) == [b"other", b""]
    store.close()


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_longest_unused_goes_first_and_the_end_of_a_chain_before_its_beginning(kind: str, tmp_path: Path) -> None:
    store = MemoryStore(1000) if kind == "memory" else DiskStore(tmp_path, 1000)
    keys = [a_key(number) for number in range(12)]
    store.put_many([(key, b"x" * 100) for key in keys[:5]])
    store.put_many([(key, b"x" * 100) for key in keys[5:9]])
    assert store.count_prefix(keys[:5]) == 5
    store.put_many([(key, b"x" * 100) for key in keys[9:12]])
    num_lost = {"memory": 2, "disk": 3}[kind]  # The disk store evicts to nine tenths of its bound.
    assert store.num_bytes == 1200 - 100 * num_lost
    lost = [number for number, key in enumerate(keys) if store.get_many([key]) == [None]]
    assert lost == [6, 7, 8][-num_lost:]


def test_a_folder_is_private_and_survives(tmp_path: Path) -> None:
    DiskStore(tmp_path / "a" / "b", 1000).put_many([(a_key(1), b"one")])
    (file,) = (tmp_path / "a" / "b").glob("*/*.kv")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    again = DiskStore(tmp_path / "a" / "b", 1000)
    assert again.num_bytes == 3
    assert again.get_many([a_key(1)]) == [b"one"]


def test_only_records_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    for name in ("notes.kv", "ab/notes.kv", "ab/readme"):
        (tmp_path / name).write_text("mine")
    store = DiskStore(tmp_path, 500)
    for number in range(20):
        store.put_many([(a_key(number), b"x" * 100)])
    assert store.num_bytes <= 500
    assert all((tmp_path / name).read_text() == "mine" for name in ("notes.kv", "ab/notes.kv", "ab/readme"))


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=f"cannot be kept in {tmp_path}/file/kv: .*; choose another folder"):
        DiskStore(tmp_path / "file" / "kv", 1000)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, 1000)

    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.put_many([(a_key(1), b"one")])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert store.num_bytes == 0


WRITER = """
import sys
from pathlib import Path
from caudex.tiers.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), 40_000)
print("up", flush=True)
number = 0
while True:
    key = (number % 300).to_bytes(32, "big")
    store.put_many([(key, key * 30)])
    number += int(sys.argv[2])
"""


def test_processes_share_a_folder_and_may_be_killed_in_a_write(tmp_path: Path) -> None:
    """Three write the same keys and evict, and are killed; a fourth reads meanwhile and never sees half a record."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(step)], stdout=subprocess.PIPE)
        for step in (1, 7, 11)
    ]
    store, keys, num_read = DiskStore(tmp_path, 40_000), [a_key(number) for number in range(300)], 0
    try:
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        ends_at = time.monotonic() + 1
        while time.monotonic() < ends_at:
            for key, record in zip(keys, store.get_many(keys), strict=True):
                assert record in (None, key * 30)
                num_read += record is not None
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    assert num_read > 0
    last = DiskStore(tmp_path, 40_000)
    last.put_many([(a_key(1000), b"x" * 960)])
    assert last.num_bytes <= 40_000
    assert last.num_bytes == sum(file.stat().st_size for file in tmp_path.glob("??/*.kv"))


def test_a_dead_server_is_an_error_and_a_new_one_is_found(valkey: ValkeyServer) -> None:
    store = ValkeyStore(valkey.url, timeout=0.3)
    store.put_many([(a_key(1), b"one")])
    valkey.kill()
    for call in (lambda: store.get_many([a_key(1)]), lambda: store.put_many([(a_key(1), b"one")])):
        with pytest.raises(OSError, match="ConnectionError"):
            call()
    valkey.start()
    store.put_many([(a_key(1), b"one")])
    assert store.get_many([a_key(1)]) == [b"one"]


def test_a_frozen_server_is_an_error_in_time(valkey: ValkeyServer) -> None:
    store = ValkeyStore(valkey.url, timeout=0.3)
    valkey.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(OSError, match="Timeout"):
            store.count_prefix([a_key(1)])
    finally:
        valkey.process.send_signal(signal.SIGCONT)


def test_what_is_not_used_expires(valkey: ValkeyServer) -> None:
    import redis

    store = ValkeyStore(valkey.url, ttl=100)
    store.put_many([(a_key(1), b"one")])
    client = redis.Redis(port=valkey.port)
    (name,) = client.keys()
    client.expire(name, 10)
    assert store.count_prefix([a_key(1)]) == 1
    assert 90 < client.ttl(name) <= 100
