"""The disk store against a dictionary, through restarts, torn files and garbled bytes, read as a tier reads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from caudex.tiers.disk_store import DiskStore

from .conftest import FORMAT, a_block, a_key

SCOPE = b"s" * 32
NUMBERS = st.integers(0, 30)
MAX_BYTES = 12 * FORMAT.record_bytes


class DiskStoreAndDictionary(RuleBasedStateMachine):
    """`stored` has what was put last under every key; the store may have lost any of it, and has nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stored: dict[int, bytes] = {}
        self.damaged: set[int] = set()
        self.restart()

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule()
    def restart(self) -> None:
        self.store = DiskStore(Path(self.folder.name), MAX_BYTES)

    @rule(start=NUMBERS, length=st.integers(1, 14), seed=st.integers(0, 5))
    def put(self, start: int, length: int, seed: int) -> None:
        records = []
        for number in range(start, start + length):
            block = a_block(seed * 100 + number)
            records.append((a_key(number), FORMAT.encode(SCOPE, a_key(number), block)))
            self.stored[number] = block
            self.damaged.discard(number)
        self.store.put_many(records)

    @rule(start=NUMBERS, length=st.integers(1, 14))
    def look_up(self, start: int, length: int) -> None:
        keys = [a_key(number) for number in range(start, start + length)]
        found = self.store.count_prefix(keys)
        records = self.store.get_many(keys)
        assert all(record is not None for record in records[:found])
        assert found == length or records[found] is None

    @rule(number=NUMBERS, cut=st.integers(0, FORMAT.record_bytes - 1))
    def tear(self, number: int, cut: int) -> None:
        if (path := self.file_of(number)).exists():
            path.write_bytes(path.read_bytes()[:cut])
            self.damaged.add(number)

    @rule(number=NUMBERS, place=st.integers(0, FORMAT.record_bytes - 1), flip=st.integers(1, 255))
    def garble(self, number: int, place: int, flip: int) -> None:
        path = self.file_of(number)
        if number not in self.damaged and path.exists():
            data = bytearray(path.read_bytes())
            data[place] ^= flip
            path.write_bytes(data)
            self.damaged.add(number)

    @rule(number=NUMBERS, other=NUMBERS)
    def misplace(self, number: int, other: int) -> None:
        if number != other and self.file_of(number).exists() and self.file_of(other).exists():
            self.file_of(other).write_bytes(self.file_of(number).read_bytes())
            self.damaged.add(other)

    @rule(name=st.sampled_from(["writing/1-1", "ab/left.kv", "zz"]))
    def leave_rubbish(self, name: str) -> None:
        path = Path(self.folder.name) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"rubbish")

    @precondition(lambda self: self.stored)
    @invariant()
    def nothing_wrong_is_read(self) -> None:
        for number, block in self.stored.items():
            (record,) = self.store.get_many([a_key(number)])
            decoded = None if record is None else FORMAT.decode(SCOPE, a_key(number), record)
            assert decoded in (None, block)
            assert record is None or (decoded is None) == (number in self.damaged)

    @invariant()
    def the_bound_holds(self) -> None:
        files = Path(self.folder.name).glob("??/*.kv")
        assert sum(file.stat().st_size for file in files if len(file.stem) == 64) <= MAX_BYTES

    def file_of(self, number: int) -> Path:
        name = a_key(number).hex()
        return Path(self.folder.name) / name[:2] / f"{name}.kv"


TestDiskStore = DiskStoreAndDictionary.TestCase
TestDiskStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
