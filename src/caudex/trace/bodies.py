"""The request body inside a JSON object, however a gateway, proxy or tracer wrapped it.

Gateways agree on nothing but the body itself, so the body is looked for by its shape, from the outside in: the first
object (nested objects, JSON kept as a string and base64 included) that has messages, a prompt, token ids or block
hashes. What stands around it (time, session, tenant) is then looked up by the names in use, nearest first.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec

from caudex.trace.messages import normalize_messages, normalize_tools
from caudex.trace.request import Request
from caudex.trace.spans import is_otlp, otlp_records, with_flat_attributes

MAX_DEPTH = 8
MAX_ASIDE_DEPTH = 3
MAX_TOKEN_ID = 1 << 31
MAX_LENGTH = 1 << 32
_LIST_KEYS = ("observations", "data")
_TOKEN_KEYS = ("prompt_token_ids", "input_ids", "token_ids", "tokens")
_MESSAGE_KEYS = ("messages", "gen_ai.input.messages", "llm.input_messages", "contents", "input")
_TEXT_KEYS = ("prompt", "inputs", "input", "text", "gen_ai.prompt", "query")

TIME_KEYS = (
    "timestamp", "arrivaltime", "starttime", "starttimeunixnano", "createdat", "requestcreatedat", "requesttime",
    "receivedat", "inferencetime", "timeunixnano", "observedtimeunixnano", "created", "time", "ts", "datetime", "date",
)  # fmt: skip
SESSION_KEYS = (
    "sessionid", "xsessionid", "genaiconversationid", "conversationid", "chatid", "threadid", "heliconesessionid",
    "litellmsessionid", "session", "promptcachekey",
)  # fmt: skip
TENANT_KEYS = (
    "tenant", "tenantid", "enduser", "enduserid", "user", "userid", "requestuserid", "heliconeuserid", "customerid",
    "userapikeyuserid", "userapikeyteamid", "organizationid",
)  # fmt: skip
MODEL_KEYS = ("model", "genairequestmodel", "llmmodelname", "modelname", "modelid", "requestmodel", "providedmodelname")
SALT_KEYS = ("cachesalt",)
LORA_KEYS = ("lora", "loraname", "lorapath", "lorarequest", "adapterid", "adapter", "loraid")
REPLICA_KEYS = ("replica", "replicaid", "worker", "workerid", "workerurl", "instance", "instanceid", "pod", "podname")
ID_KEYS = ("requestid", "id", "rid", "customid", "heliconeid", "eventid", "spanid", "litellmcallid")
INPUT_LENGTH_KEYS = ("inputlength", "prompttokens", "inputtokens", "genaiusageinputtokens")
OUTPUT_LENGTH_KEYS = ("outputlength", "completiontokens", "outputtokens", "genaiusageoutputtokens")
_ANSWERS = frozenset({
    "response", "output", "responsebody", "endpointoutput", "providerresponse", "genaioutputmessages",
    "llmoutputmessages", "outputs",
})  # fmt: skip
_ASIDE = frozenset({
    "metadata", "attributes", "usage", "properties", "requestproperties", "extrabody", "modelparameters",
    "optionalparams", "litellmparams", "proxyserverrequest", "requestermetadata", "body", "meta", "timing", "extra",
    "invocationparams", "headers", "requestheaders", "eventmetadata", "request", "info", "userinfo", "resource",
})  # fmt: skip


@lru_cache(maxsize=4096)
def plain_key(key: str) -> str:
    """A key as the tables above spell it: `X-Session-ID`, `session_id` and `sessionId` are one name."""
    return "".join(c for c in key.lower() if c.isalnum())


def parse_object(value: Any, line: int, field: str | None = None) -> list[Request]:
    """All requests in one JSON value of a log: none, one, or (OTLP exports, arrays) several.

    Raises:
        ValueError: it is an object, but no request was found in it, or the request is malformed.
    """
    if field is not None:
        return [_at_field(value, line, field)]
    if isinstance(value, list):
        if value and all(isinstance(item, dict) and "role" in item for item in value):
            return [_build([{"messages": value}], line)]
        return [request for item in value for request in parse_object(item, line)]
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    if is_otlp(value):
        return [request for record in otlp_records(value) for request in _parse_record(record, line)]
    if (listed := _listed(value)) is not None:
        return [request for path in listed for request in [_build(path, line)]]
    path = find_body(value)
    if path is None:
        known = next((key for key in (*_MESSAGE_KEYS, *_TEXT_KEYS, *_TOKEN_KEYS) if key in value), None)
        if known is not None:
            raise ValueError(f"its {known!r} is empty, or neither messages nor a prompt")
        raise ValueError(f"no messages, prompt, token ids or hash_ids in it (its keys: {_some_keys(value)})")
    return [_build(path, line)]


def _listed(value: dict[str, Any]) -> list[list[dict[str, Any]]] | None:
    """The way to each body in an export that lists calls inside one object (a Langfuse trace with its observations, a
    page of an API); None for what is no such list. Steps that are no model calls are passed over."""
    for key in _LIST_KEYS:
        items = value.get(key)
        if isinstance(items, list) and items and all(isinstance(item, dict) for item in items):
            calls = [item for item in items if str(item.get("type", "GENERATION")).upper() == "GENERATION"]
            paths = [path for item in calls if (path := find_body(item)) is not None]
            if paths:
                outer = {name: inner for name, inner in value.items() if name not in {key, "input", "output"}}
                return [[outer, *path] for path in paths]
    return None


def _some_keys(value: dict[str, Any]) -> str:
    keys = list(value)
    return ", ".join(keys[:6]) + (", ..." if len(keys) > 6 else "")


def _at_field(value: Any, line: int, field: str) -> Request:
    path: list[dict[str, Any]] = []
    current = value
    for name in field.split("."):
        current = _decoded(current)
        if isinstance(current, list) and name.isdigit() and int(name) < len(current):
            current = current[int(name)]
            continue
        if not isinstance(current, dict) or name not in current:
            raise ValueError(f"no field {field!r} in it (missing: {name!r})")
        path.append(current)
        current = current[name]
    current = _decoded(current)
    if isinstance(current, dict) and _is_body(current):
        return _build([*path, current], line)
    if isinstance(current, str):
        return _build([*path, {"prompt": current}], line)
    if isinstance(current, list) and current and isinstance(current[0], int):
        return _build([*path, {"prompt_token_ids": current}], line)
    if isinstance(current, list):
        return _build([*path, {"messages": current}], line)
    raise ValueError(
        f"field {field!r} holds {type(current).__name__}, not a request body, messages, a prompt or token ids"
    )


def find_body(root: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The objects on the way from `root` to the request body in it, the body last; None if there is none."""
    queue: deque[list[dict[str, Any]]] = deque([[with_flat_attributes(root)]])
    while queue:
        path = queue.popleft()
        if _is_body(path[-1]):
            return path
        if len(path) >= MAX_DEPTH:
            continue
        for key, child in path[-1].items():
            if plain_key(key) in _ANSWERS:
                continue
            for inner in _objects_in(child, path[-1]):
                queue.append([*path, inner])
    return None


def _objects_in(value: Any, parent: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if isinstance(value, str):
        value = _decoded(value, str(parent.get("encoding", "")))
        if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
            value = {"messages": value}
    if isinstance(value, dict):
        yield with_flat_attributes(value)
    elif isinstance(value, list):
        for item in value[:4]:
            if isinstance(item, dict):
                yield with_flat_attributes(item)


def _decoded(value: Any, encoding: str = "") -> Any:
    if not isinstance(value, str):
        return value
    if encoding.upper() == "BASE64":
        try:
            value = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return value
    if value[:1] in "{[" and len(value) > 2:
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and (
        "role" in value[0] or ("parts" in value[0] or value[0].get("type") in {"message", "function_call"})
    )  # fmt: skip


def _is_body(value: dict[str, Any]) -> bool:
    if any(_is_messages(_decoded(value[key])) for key in _MESSAGE_KEYS if key in value):
        return True
    if any(isinstance(value.get(key), list) and value[key] for key in ("hash_ids", "block_hashes", *_TOKEN_KEYS)):
        return True
    for key in _TEXT_KEYS:
        found = value.get(key)
        if isinstance(found, str) and found and not isinstance(_decoded(found), (dict, list)):
            return key != "text" or "sampling_params" in value or "model" in value or len(value) <= 4
        if key == "prompt" and isinstance(found, list) and found:
            return True
    return False


def _build(path: list[dict[str, Any]], line: int) -> Request:
    around = [{plain_key(key): value for key, value in item.items()} for item in _surroundings(path)]
    body = path[-1]
    request = Request(
        line=line,
        request_id=_text(around, ID_KEYS),
        timestamp=_time(around),
        session=_text(around, SESSION_KEYS),
        tenant=_text(around, TENANT_KEYS),
        model=_text(around, MODEL_KEYS),
        lora=_text(around, LORA_KEYS),
        salt=_text(around, SALT_KEYS),
        replica=_text(around, REPLICA_KEYS),
        input_length=_count(around, INPUT_LENGTH_KEYS, "input_length"),
        output_length=_count(around, OUTPUT_LENGTH_KEYS, "output_length"),
        output=_output(path),
    )
    _fill_prompt(request, body, around)
    return request


def _surroundings(path: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The body, what holds it, and the side objects of each (metadata, usage, headers), nearest first."""
    for item in reversed(path):
        yield item
        yield from _asides(item, MAX_ASIDE_DEPTH)


def _asides(item: dict[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    for key, value in item.items():
        if plain_key(key) == "usagedetails" and isinstance(value, dict):
            yield {"inputtokens": value.get("input"), "outputtokens": value.get("output")}
        elif plain_key(key) in _ASIDE and isinstance(aside := _decoded(value), dict):
            yield aside
            if depth > 1:
                yield from _asides(aside, depth - 1)


def _fill_prompt(request: Request, body: dict[str, Any], around: list[dict[str, Any]]) -> None:
    for key in ("hash_ids", "block_hashes"):
        if isinstance(body.get(key), list) and body[key]:
            request.hash_ids = _integers(body[key], key)
            request.block_size = _count(around, ("blocksize", "pagesize"), "block_size")
            return
    for key in _MESSAGE_KEYS:
        messages = _decoded(body.get(key))
        if _is_messages(messages):
            system = body.get("system") or body.get("instructions") or body.get("gen_ai.system_instructions")
            system = system or body.get("systemInstruction") or body.get("system_instruction")
            request.messages = normalize_messages(messages, _system_text(system))
            request.tools = _tools(around)
            return
    if isinstance(body.get("input"), str) and ("instructions" in body or "tools" in body):  # of the responses API
        request.messages = normalize_messages([body["input"]], body.get("instructions"))
        request.tools = _tools(around)
        return
    for key in _TOKEN_KEYS:
        if isinstance(body.get(key), list) and body[key]:
            request.token_ids = token_ids(body[key], key)
            return
    for key in _TEXT_KEYS:
        found = body.get(key)
        if isinstance(found, str) and found:
            request.text = found
            return
        if key == "prompt" and isinstance(found, list) and found:
            _fill_prompt_list(request, found)
            return
    raise ValueError("the prompt is empty")


def _fill_prompt_list(request: Request, prompt: list[Any]) -> None:
    if isinstance(prompt[0], int):
        request.token_ids = token_ids(prompt, "prompt")
    elif isinstance(prompt[0], str) and len(prompt) == 1:
        request.text = prompt[0]
    elif isinstance(prompt[0], dict):
        request.messages = normalize_messages(prompt)
    else:
        raise ValueError(f"`prompt` is a batch of {len(prompt)} prompts; log one request a line")


def _system_text(system: Any) -> Any:
    system = _decoded(system)
    return system.get("parts", system) if isinstance(system, dict) else system


def _tools(around: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    for item in around:
        for key in ("tools", "genaitooldefinitions", "functions", "toolconfig"):
            if item.get(key):
                return normalize_tools(_decoded(item[key]))
    return None


def _integers(values: list[Any], key: str) -> list[int]:
    if not all(isinstance(value, int) for value in values):
        raise ValueError(f"`{key}` holds something other than whole numbers")
    return values


def token_ids(values: list[Any], key: str) -> Sequence[int]:
    """The ids at 4 bytes each, since windows of long requests are held. Raises ValueError for what is no token id."""
    if set(map(type, values)) <= {int} and min(values) >= 0 and max(values) < MAX_TOKEN_ID:
        return array("i", values)
    odd = next(value for value in values if type(value) is not int or not 0 <= value < MAX_TOKEN_ID)
    raise ValueError(f"`{key}` holds {odd!r}, which is no token id")


def _first(around: list[dict[str, Any]], keys: tuple[str, ...]) -> Any:
    for item in around:
        for key in keys:
            value = item.get(key)
            if value is not None and value != "":
                return value
    return None


def _text(around: list[dict[str, Any]], keys: tuple[str, ...]) -> str | None:
    value = _first(around, keys)
    if isinstance(value, dict):
        value = value.get("name") or value.get("id") or value.get("lora_name")
    return str(value) if isinstance(value, (str, int, float)) else None


def _count(around: list[dict[str, Any]], keys: tuple[str, ...], name: str) -> int | None:
    value = _first(around, keys)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    if not 0 <= value <= MAX_LENGTH:
        raise ValueError(f"{name} is {value}: expected a number of tokens, 0 or more")
    return int(value)


def _time(around: list[dict[str, Any]]) -> float | None:
    value = _first(around, TIME_KEYS)
    return None if value is None else parse_time(value)


def parse_time(value: object) -> float | None:
    """Seconds since the epoch (or since the log's start) from a number in s, ms, us or ns, or an ISO 8601 string,
    or seconds and milliseconds apart."""
    if isinstance(value, dict) and isinstance(value.get("seconds"), (int, float)):
        return float(value["seconds"]) + float(value.get("milliseconds") or 0) / 1e3
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            try:
                moment = datetime.fromisoformat(str(value))
            except ValueError:
                return None
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    for limit, scale in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if value >= limit:
            return value / scale
    return float(value)


def _output(path: list[dict[str, Any]]) -> str | list[int] | None:
    for item in reversed(path):
        for key in ("output_token_ids", "output_ids", "response", "output", "response_body", "completion"):
            if key in item:
                found = _output_of(_decoded(item[key]))
                if found is not None:
                    return found
    return None


def _output_of(value: Any) -> str | list[int] | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [int(item) for item in value]
    if isinstance(value, list) and len(value) == 1:
        return _output_of(value[0])
    if not isinstance(value, dict):
        return None
    for key in ("body", "choices", "message", "content", "text", "output_token_ids"):
        if key in value:
            return _output_of(value[key])
    return None


def _parse_record(record: dict[str, Any], line: int) -> list[Request]:
    path = find_body(record)
    return [] if path is None else [_build(path, line)]
