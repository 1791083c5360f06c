"""KV events as vLLM and SGLang publish them, decoded.

A batch is a msgpack array `[timestamp, events, data-parallel rank]`; each event is a map with its `type` (older
publishers: an array that starts with it). Hashes come as integers or as bytes, of which the low 64 bits name a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_LOW_64_BITS = (1 << 64) - 1
_STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks, the first below `parent` (None: the root of its namespace)."""

    hashes: NDArray[np.uint64]
    parent: int | None
    tokens: NDArray[np.int32]
    block_size: int
    adapter: str
    salt: str


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    hashes: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


def decode_batch(payload: bytes) -> list[KvEvent]:
    """The events of one batch that concern GPU (or main) memory, of the first KV group where a model has several
    (they hold the same prefixes); ValueError for what is not a batch."""
    try:
        batch = msgspec.msgpack.decode(payload)
        raw_events = batch[1]
        return [event for raw in raw_events if (event := _decode_event(raw)) is not None]
    except (msgspec.MsgspecError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def _decode_event(raw: Any) -> KvEvent | None:
    fields = raw if isinstance(raw, dict) else _from_array(raw)
    kind = fields["type"]
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if fields.get("medium") not in (None, "GPU", "gpu") or fields.get("group_idx") not in (None, 0):
        return None
    if kind == "BlockRemoved":
        return BlocksRemoved(_hashes(fields["block_hashes"]))
    if kind == "BlockStored":
        return _stored(fields)
    return None


def _from_array(raw: list[Any]) -> dict[str, Any]:
    names = _STORED_FIELDS if raw[0] == "BlockStored" else ("block_hashes", "medium")
    return {"type": raw[0], **dict(zip(names, raw[1:], strict=False))}


def _stored(fields: dict[str, Any]) -> BlocksStored:
    parent = fields.get("parent_block_hash")
    block_size = int(fields["block_size"])
    hashes = _hashes(fields["block_hashes"])
    tokens = np.array(fields["token_ids"], dtype=np.int32)
    if block_size < 1 or len(tokens) != len(hashes) * block_size:
        raise ValueError(f"{len(hashes)} blocks of {block_size} do not hold {len(tokens)} tokens")
    adapter = fields.get("lora_name") or ""
    extra = [_without_adapter(keys or (), adapter) for keys in fields.get("extra_keys") or ()]
    known = _num_told_by_tokens(extra, len(hashes))
    return BlocksStored(
        hashes[:known],
        None if parent is None else _hash(parent),
        tokens[: known * block_size],
        block_size,
        adapter,
        _salt(fields, extra),
    )


def _salt(fields: dict[str, Any], extra: list[Sequence[Any]]) -> str:
    """SGLang has a field for the salt; vLLM puts it among the first block's extra keys."""
    first = extra[0] if extra else ()
    return fields.get("cache_salt") or next((key for key in first if isinstance(key, str)), "")


def _without_adapter(keys: Sequence[Any], adapter: str) -> Sequence[Any]:
    """A block's extra keys, of which the first is the adapter's name if there is one."""
    return keys[1:] if adapter and keys and keys[0] == adapter else keys


def _num_told_by_tokens(extra: list[Sequence[Any]], num_blocks: int) -> int:
    """Leading blocks that tokens and salt name. Images and embeddings (keys that are no plain strings) have the same
    placeholder tokens whatever they show, so a block with one, and all below it, must not be credited."""
    for i, keys in enumerate(extra):
        if any(not isinstance(key, str) for key in keys):
            return i
    return num_blocks


def _hashes(values: list[int | bytes]) -> NDArray[np.uint64]:
    return np.array([_hash(value) for value in values], dtype=np.uint64)


def _hash(value: int | bytes) -> int:
    number = int.from_bytes(value, "big") if isinstance(value, bytes) else value
    return number & _LOW_64_BITS
