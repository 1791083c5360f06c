"""Requests in the logs of vLLM (`--enable-log-requests --log-level DEBUG`) and SGLang (`--log-requests
--log-requests-level 3`, as text or with `--log-requests-format json`)."""

from __future__ import annotations

import ast
import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from caudex.trace.bodies import parse_time, token_ids
from caudex.trace.request import Request

_LITERAL = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_VLLM = re.compile(r"(?:Received request|Request) (\S+?)(?: details)?: prompt: (?:None|" + _LITERAL + r"), ")
_SGLANG = re.compile(r"Receive: obj=\w*ReqInput\(")
_SGLANG_TEXT = re.compile(r"\btext=" + _LITERAL)
_SGLANG_EVENT = re.compile(r'\{"timestamp": .*"event": "request\.')
_SGLANG_CUT_CHARS = 2048
"""Level 2 writes longer prompts as their first and last halves of this."""

_CUT = re.compile(r""" \.\.\. ['"\[]""")
_SGLANG_RID = re.compile(r"\brid='([^']*)'")
_TOKEN_IDS = re.compile(r"\b(?:prompt_token_ids|input_ids)[:=] ?\[([\d, ]+)\]")
_LORA_NAME = re.compile(r"lora_name='([^']*)'|lora_path='([^']*)'")
_SHORT_TIME = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
_LONG_TIME = re.compile(r"\b(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")


def parse_server_line(text: str, line: int) -> Request | None:
    """The request that a line of a server's log announces, or None where the line is about something else.

    Raises:
        ValueError: the line announces a request but its prompt is missing or cut short.
    """
    if (event := _SGLANG_EVENT.search(text)) is not None:
        return parse_sglang_event(msgspec.json.decode(text[event.start() :]), line)
    vllm = _VLLM.search(text)
    if vllm is None and _SGLANG.search(text) is None:
        return None
    request = Request(line=line, timestamp=_time_of(text))
    if vllm is not None:
        request.request_id, literal = vllm[1], vllm[2]
    else:
        rid, found = _SGLANG_RID.search(text), _SGLANG_TEXT.search(text)
        _refuse_cut(text, found)
        request.request_id, literal = rid[1] if rid else None, found[1] if found else None
    if (lora := _LORA_NAME.search(text)) is not None:
        request.lora = lora[1] or lora[2]
    if (tokens := _TOKEN_IDS.search(text)) is not None:
        _refuse_cut(text, tokens)
        request.token_ids = token_ids([int(token) for token in tokens[1].split(",")], "prompt_token_ids")
    elif literal is not None and literal[1:-1]:
        request.text = ast.literal_eval(literal)
    else:
        raise ValueError("the server logged a request without its prompt; raise its log level for requests")
    return request


def _refuse_cut(text: str, prompt: re.Match[str] | None) -> None:
    if prompt is not None and _CUT.match(text, prompt.end()):
        raise ValueError("the server cut the prompt's middle out; SGLang logs all of it with --log-requests-level 3")


def is_sglang_event(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("event", "")).startswith("request.") and "timestamp" in value


def parse_sglang_event(value: dict[str, Any], line: int) -> Request | None:
    """The request that one line of SGLang's JSON log announces, or None where the line is about something else.

    Raises:
        ValueError: its prompt is missing or cut short.
    """
    asked = value.get("obj")
    if value.get("event") != "request.received" or not isinstance(asked, dict):
        return None
    request = Request(line=line, timestamp=parse_time(value["timestamp"]), request_id=str(value.get("rid")))
    ids, text = asked.get("input_ids"), asked.get("text")
    if (isinstance(ids, list) and "..." in ids) or (isinstance(text, str) and _is_cut(text)):
        raise ValueError("the server cut the prompt's middle out; SGLang logs all of it with --log-requests-level 3")
    lora = asked.get("lora_path")
    request.lora = lora if isinstance(lora, str) else None
    if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
        request.token_ids = token_ids(ids, "input_ids")
    elif isinstance(text, str) and text:
        request.text = text
    else:
        raise ValueError("the server logged a request without its prompt; raise its log level for requests")
    return request


def _is_cut(text: str) -> bool:
    half = _SGLANG_CUT_CHARS // 2
    return len(text) == _SGLANG_CUT_CHARS + 3 and text[half : half + 3] == "..."


def _time_of(text: str) -> float | None:
    if (found := _LONG_TIME.search(text[:80])) is not None:
        moment = datetime.fromisoformat(found[1].replace(",", "."))
        return moment.replace(tzinfo=UTC).timestamp()
    if (found := _SHORT_TIME.search(text[:80])) is not None:
        month, day, hour, minute, second = (int(part) for part in found.groups())
        return datetime(2000, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    return None
