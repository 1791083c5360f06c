"""Hash traces: requests whose prompts are lists of prefix-chained block ids, without any text.

Mooncake and plain `hash_ids` carry one request a line; Qwen-Bailian adds `chat_id` and `parent_chat_id`;
kv-cache-tester (WEKA) keeps a whole conversation in one object. Block sizes differ and are not always written down.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from caudex.trace.bodies import MAX_LENGTH, parse_time
from caudex.trace.chain import seed_of
from caudex.trace.errors import LengthsOnlyError
from caudex.trace.request import Request

MOONCAKE_BLOCK_SIZE = 512
BAILIAN_BLOCK_SIZE = 16

_LENGTH_KEYS = frozenset({"input_length", "ContextTokens", "Request tokens", "prompt_len", "num_prefill_tokens"})


def is_hash_object(value: Any) -> bool:
    return isinstance(value, dict) and ("hash_ids" in value or is_conversation(value))


def is_conversation(value: Any) -> bool:
    """A kv-cache-tester object: one conversation with its requests inside."""
    requests = value.get("requests") if isinstance(value, dict) else None
    return isinstance(requests, list) and any(isinstance(item, dict) and "hash_ids" in item for item in requests)


def is_lengths_only(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(_LENGTH_KEYS & value.keys())
        and not {"hash_ids", "prompt", "messages"} & value.keys()
    )


class HashReader:
    """Turns hash-trace objects into requests. Holds the root of every Bailian chat seen, 1 small entry a chat."""

    def __init__(self, block_size: int | None = None) -> None:
        self._block_size = block_size
        self._root_of_chat: dict[Any, Any] = {}

    def parse(self, value: dict[str, Any], line: int) -> list[Request]:
        """The requests of one object.

        Raises:
            ValueError: ids or lengths are malformed; the message names them.
        """
        if is_conversation(value):
            session = str(value.get("id", line))
            scope = 0 if value.get("hash_id_scope", "local") == "global" else seed_of(session) >> 1
            return list(self._conversation(value, line, session, scope))
        if "chat_id" in value:
            return [self._bailian(value, line)]
        return [self._plain(value, line, "timestamp", 1e-3)]

    def _plain(self, value: dict[str, Any], line: int, time_key: str, time_scale: float) -> Request:
        ids = value["hash_ids"]
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise ValueError("hash_ids is not a list of whole numbers")
        block_size = value.get("block_size") or self._block_size or MOONCAKE_BLOCK_SIZE
        if type(block_size) is not int or block_size < 1:
            raise ValueError(f"block_size is {block_size!r}: expected a whole number of at least 1")
        input_length = _length(value, "input_length", len(ids) * block_size)
        timestamp = value.get(time_key)
        session = value.get("session_id")
        return Request(
            line=line,
            request_id=_optional_text(value.get("request_id")),
            timestamp=float(timestamp) * time_scale if isinstance(timestamp, (int, float)) else parse_time(timestamp),
            session=_optional_text(session),
            tenant=_optional_text(value.get("tenant") or value.get("user_id")),
            model=_optional_text(value.get("model")),
            lora=_optional_text(value.get("lora")),
            salt=_optional_text(value.get("cache_salt")),
            replica=_optional_text(value.get("replica")),
            hash_ids=_compact(ids),
            block_size=block_size,
            input_length=input_length,
            output_length=_length(value, "output_length", 0),
        )

    def _bailian(self, value: dict[str, Any], line: int) -> Request:
        value = {"block_size": self._block_size or BAILIAN_BLOCK_SIZE, **value}
        request = self._plain(value, line, "timestamp", 1.0)
        chat, parent = value["chat_id"], value.get("parent_chat_id", -1)
        root = self._root_of_chat.get(parent, chat)
        self._root_of_chat[chat] = root
        request.session = str(root)
        return request

    def _conversation(self, value: dict[str, Any], line: int, session: str, scope: int) -> Iterator[Request]:
        """A conversation's requests and those of its subagents; `scope` keeps its ids apart from others'."""
        for item in value["requests"]:
            if "hash_ids" not in item:
                if isinstance(item.get("requests"), list):
                    nested = {"block_size": value.get("block_size"), **item}
                    name = f"{session}/{item.get('agent_id', item.get('id', ''))}"
                    yield from self._conversation(nested, line, name, scope)
                continue
            renamed = {**item, "input_length": item.get("in", item.get("input_length")), "session_id": session}
            renamed["output_length"] = item.get("out", item.get("output_length", 0))
            renamed["block_size"] = value.get("block_size") or self._block_size or 64
            if renamed["input_length"] is None:
                del renamed["input_length"]
            request = self._plain(renamed, line, "t", 1.0)
            request.hash_ids = _compact([scope ^ item for item in request.hash_ids or ()])
            yield request


def refuse_lengths_only(source: str, value: dict[str, Any]) -> None:
    """Raise LengthsOnlyError, naming what the log does hold."""
    raise LengthsOnlyError(source, ", ".join(list(value)[:6]))


def _compact(ids: list[int]) -> Sequence[int]:
    """The ids at 8 bytes each, where they fit: a window of long requests is held while they are put in order."""
    try:
        return array("q", ids)
    except OverflowError:
        return ids


def _optional_text(value: object) -> str | None:
    return None if value is None else str(value)


def _length(value: dict[str, Any], key: str, default: int) -> int:
    number = value.get(key)
    if number is None:
        return default
    if type(number) not in {int, float} or not 0 <= number <= MAX_LENGTH:
        raise ValueError(f"{key} is {number!r}: expected a number of tokens, 0 or more")
    return int(number)
