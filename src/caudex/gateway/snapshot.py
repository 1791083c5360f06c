"""What a gateway keeps across a restart: where sessions and responses live, and which worker was sent what."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

_MAGIC = b"caudex routing 2\n"
_DIGEST_BYTES = 32


class Snapshot(msgspec.Struct, array_like=True):
    """`worker_ids` by slot, which is what all else means by a worker."""

    policy: str
    worker_ids: list[str | None]
    state: bytes
    response_homes: list[tuple[str, str, int]]


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replaces the file in one step, so that a crash leaves the old one or the new one."""
    payload = msgspec.msgpack.encode(snapshot)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_snapshot(path: Path, policy_name: str) -> Snapshot:
    """ValueError for a file that is not whole, or of another policy."""
    data = path.read_bytes()
    digest_end = len(_MAGIC) + _DIGEST_BYTES
    payload = data[digest_end:]
    if not data.startswith(_MAGIC) or hashlib.sha256(payload).digest() != data[len(_MAGIC) : digest_end]:
        raise ValueError(f"{path} is not a whole routing snapshot")
    try:
        snapshot = msgspec.msgpack.decode(payload, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error
    if snapshot.policy != policy_name:
        raise ValueError(f"{path} is of policy {snapshot.policy!r}, not {policy_name!r}")
    return snapshot
