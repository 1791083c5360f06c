"""What a gateway keeps across a restart: where sessions live, and which worker was sent what."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from caudex.routing import Fleet, Policy

_MAGIC = b"caudex routing 1\n"
_DIGEST_BYTES = 32


class _Snapshot(msgspec.Struct, array_like=True):
    policy: str
    worker_ids: list[str | None]
    state: bytes


def write_snapshot(path: Path, policy_name: str, fleet: Fleet, policy: Policy) -> None:
    """Replaces the file in one step, so that a crash leaves the old one or the new one."""
    payload = msgspec.msgpack.encode(_Snapshot(policy_name, list(fleet.ids), policy.dump()))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_snapshot(path: Path, policy_name: str, policy: Policy) -> list[str | None]:
    """Gives the policy its state back; the workers by slot. ValueError, and no change, for anything not whole."""
    data = path.read_bytes()
    digest_end = len(_MAGIC) + _DIGEST_BYTES
    payload = data[digest_end:]
    if not data.startswith(_MAGIC) or hashlib.sha256(payload).digest() != data[len(_MAGIC) : digest_end]:
        raise ValueError(f"{path} is not a whole routing snapshot")
    try:
        snapshot = msgspec.msgpack.decode(payload, type=_Snapshot)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error
    if snapshot.policy != policy_name:
        raise ValueError(f"{path} is of policy {snapshot.policy!r}, not {policy_name!r}")
    policy.load(snapshot.state)
    return snapshot.worker_ids
