"""Stores as users name them: `disk:/var/cache/kv,size=20GB`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from caudex.sizing.byte_size import parse_byte_size
from caudex.tiers.disk_store import DiskStore
from caudex.tiers.memory_store import MemoryStore
from caudex.tiers.store import BlockStore
from caudex.tiers.valkey_store import ValkeyStore

DEFAULT_MEMORY_SIZE = "1GiB"
DEFAULT_DISK_SIZE = "10GiB"
DEFAULT_TTL = "86400"
EXPECTED = "expected disk:PATH[,size=10GiB], valkey://HOST[:PORT][,ttl=SECONDS] or memory[:][,size=1GiB]"


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store that can be opened; `open` raises OSError or ImportError, whose message says what to do."""

    text: str
    open: Callable[[], BlockStore]


def parse_store(text: str) -> StoreSpec:
    """What `text` names.

    Raises:
        ValueError: it names no store; the message quotes it and says what was expected.
    """
    place, *settings = text.split(",")
    kind, _, rest = place.partition(":")
    if kind == "memory" and not rest:
        size = _size(text, _settings(text, settings, {"size": DEFAULT_MEMORY_SIZE})["size"])
        return StoreSpec(text, lambda: MemoryStore(size))
    if kind == "disk" and rest:
        size = _size(text, _settings(text, settings, {"size": DEFAULT_DISK_SIZE})["size"])
        return StoreSpec(text, lambda: DiskStore(Path(rest).expanduser().absolute(), size))
    if kind in ("valkey", "valkeys", "redis", "rediss") and _has_host(place):
        ttl = _seconds(text, _settings(text, settings, {"ttl": DEFAULT_TTL})["ttl"])
        return StoreSpec(text, lambda: ValkeyStore(place, ttl))
    raise ValueError(f"{text!r} is no KV tier; {EXPECTED}")


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _settings(text: str, given: list[str], defaults: Mapping[str, str]) -> dict[str, str]:
    settings = dict(defaults)
    for setting in given:
        name, equals, value = setting.partition("=")
        if not equals or name not in defaults:
            raise ValueError(f"{setting!r} in the KV tier {text!r} is no setting of it; {EXPECTED}")
        settings[name] = value
    return settings


def _size(text: str, size: str) -> int:
    num_bytes = parse_byte_size(size)
    if not num_bytes:
        raise ValueError(f"the size {size!r} in the KV tier {text!r} is no size; write 512M, or 20GiB")
    return num_bytes


def _seconds(text: str, seconds: str) -> int:
    if not seconds.isascii() or not seconds.isdigit() or not 1 <= int(seconds) <= 2**31:
        raise ValueError(f"the ttl {seconds!r} in the KV tier {text!r} is no number of seconds, such as 3600")
    return int(seconds)
