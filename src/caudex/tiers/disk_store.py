"""Blocks in a folder, which survive the process and can be shared by several on one machine."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from caudex.tiers.store import BlockKey

_SUFFIX = ".kv"
_SCRATCH = "writing"
_ABANDONED_SECONDS = 3600.0
_KEPT_SHARE = 0.9
"""An eviction reads the whole folder; making room for a tenth of it makes that rare."""

_DEPTH_NS = 1_000
"""Of blocks used together, each is marked this much older than the one before it, so that the last goes first."""


class DiskStore:
    """A file a record, `ab/abcd....kv` by the key's hexadecimal digits; the time of last use is the file's mtime.

    A record is written to a scratch file and renamed into place: a reader sees all of it or none, in this process or
    another one. Several processes may use a folder at once: they write equal files under equal names, one evicts at a
    time, and each bound holds for what all have written, as often as it looks (see `_evict`).

    Nothing is fsynced: after a power cut, files of the last seconds may be missing, short or empty, which a record's
    checksum tells. Only files that have such names are ever deleted.

    Costs: a look-up is a system call a key (some microseconds), a read an open and a read; an eviction lists the
    folder, once for every tenth of `max_bytes` that is written.

    Raises:
        OSError: the folder cannot be made or written to; the message names it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.name = f"disk:{folder}"
        self._folder = folder
        self._max_bytes = max_bytes
        self._scratch = folder / _SCRATCH
        self._numbers = itertools.count()
        try:
            self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._probe()
        except OSError as error:
            raise OSError(f"KV blocks cannot be kept in {folder}: {error.strerror}; choose another folder") from error
        self._remove_abandoned_scratch()
        self._num_bytes = sum(size for _, size, _ in self._files())

    @property
    def num_bytes(self) -> int:
        """Size of all files as of the last look, and what this process has written since."""
        return self._num_bytes

    def count_prefix(self, keys: Sequence[BlockKey]) -> int:
        now = time.time_ns()
        for place, key in enumerate(keys):
            try:
                self._mark(self._path(key), now, place)
            except FileNotFoundError:
                return place
        return len(keys)

    def get_many(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        return [_read(self._path(key)) for key in keys]

    def put_many(self, records: Sequence[tuple[BlockKey, bytes]]) -> None:
        now = time.time_ns()
        for place, (key, record) in enumerate(records):
            self._write(self._path(key), record, now, place)
        if self._num_bytes > self._max_bytes:
            self._evict()

    def close(self) -> None:
        """Nothing is open between calls."""

    def _path(self, key: BlockKey) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}{_SUFFIX}"

    def _mark(self, path: str, now: int, place: int) -> None:
        used = now - place * _DEPTH_NS
        os.utime(path, ns=(used, used))

    def _write(self, path: str, record: bytes, now: int, place: int) -> None:
        scratch = f"{self._scratch}/{os.getpid()}-{next(self._numbers)}"
        try:
            with open(scratch, "xb", buffering=0, opener=_private) as file:
                if file.write(record) < len(record):
                    raise OSError(f"{scratch} could not be written whole")
            self._mark(scratch, now, place)
            old_size = _size(path)
            _rename(scratch, path)
        except OSError:
            with suppress(OSError):
                os.unlink(scratch)
            raise
        self._num_bytes += len(record) - old_size

    def _evict(self) -> None:
        """Delete the longest unused files until nine tenths of the bound are left, whoever has written them.

        Where another process is at it, its work is trusted.
        """
        with self._alone() as alone:
            if not alone:
                self._num_bytes = int(self._max_bytes * _KEPT_SHARE)
                return
            files = sorted(self._files())
            self._num_bytes = sum(size for _, size, _ in files)
            for _, size, path in files:
                if self._num_bytes <= self._max_bytes * _KEPT_SHARE:
                    return
                with suppress(FileNotFoundError):
                    os.unlink(path)
                self._num_bytes -= size

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether, within this context, no other process evicts; a killed one lets go at once."""
        with open(self._folder / "lock", "ab", opener=_private) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Time of last use, size and path of every record."""
        for folder in _listing(self._folder):
            if len(folder.name) != 2:
                continue
            for entry in _listing(folder.path):
                if entry.name.endswith(_SUFFIX) and len(entry.name) == 64 + len(_SUFFIX):
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        yield found.st_mtime_ns, found.st_size, entry.path

    def _probe(self) -> None:
        path = self._scratch / f"{os.getpid()}-probe"
        path.write_bytes(b"")
        path.unlink()

    def _remove_abandoned_scratch(self) -> None:
        """Remove what processes that were killed in a write have left."""
        for entry in _listing(self._scratch):
            with suppress(OSError):
                if time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                    os.unlink(entry.path)


def _private(path: str, flags: int) -> int:
    """Opens a file that only this user may read: KV tells what was asked."""
    return os.open(path, flags, 0o600)


def _listing(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except FileNotFoundError:
        return None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _rename(source: str, target: str) -> None:
    try:
        os.replace(source, target)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.replace(source, target)
