"""Every format named in the documentation, as its maker writes it, read without being told which it is."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from caudex.trace.errors import LengthsOnlyError, TraceError
from caudex.trace.reader import LogReader
from caudex.trace.request import Request

QUESTION = "How deep is the sea?"
MESSAGES = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": QUESTION}]
FUNCTION = {"name": "depth", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
BODY: dict[str, Any] = {"model": "m", "messages": MESSAGES, "tools": TOOLS}
TIME = "2026-03-01T10:00:00Z"
SECONDS = 1772359200.0
ANSWER = {"choices": [{"message": {"role": "assistant", "content": "Deep."}}]}


def read(path: Path, **options: Any) -> list[Request]:
    return list(LogReader(path, **options))


def write(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in objects))
    return path


SPAN = {
    "gen_ai.request.model": "m",
    "gen_ai.conversation.id": "conv",
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "You are terse."}]),
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": QUESTION}]}]),
    "gen_ai.tool.definitions": json.dumps(TOOLS),
}
OTLP = [{"key": key, "value": {"stringValue": value}} for key, value in SPAN.items()]
OTLP.append({"key": "gen_ai.usage.output_tokens", "value": {"intValue": "7"}})
CAPTURED = {"observedContentType": "application/json", "mode": "INPUT"}
EVENT = {"eventId": "x", "inferenceTime": TIME}

WRAPPED: dict[str, dict[str, Any]] = {
    "bare OpenAI": {**BODY, "timestamp": 1772359200, "session_id": "conv"},
    "OpenAI batch": {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
    "OpenAI responses": {
        "model": "m",
        "instructions": "You are terse.",
        "tools": [{"type": "function", **FUNCTION}],
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    },
    "Anthropic": {
        "model": "m",
        "system": [{"type": "text", "text": "You are terse."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        "tools": [{"name": "depth", "input_schema": FUNCTION["parameters"]}],
    },
    "LiteLLM": {
        "id": "x",
        "call_type": "acompletion",
        "model": "m",
        "messages": MESSAGES,
        "startTime": TIME,
        "response": ANSWER,
        "model_parameters": {"tools": TOOLS},
        "metadata": {"user_api_key_user_id": "u", "session_id": "conv"},
    },
    "LiteLLM proxy": {"request_id": "x", "startTime": TIME, "proxy_server_request": json.dumps(BODY)},
    "Langfuse": {
        "id": "x",
        "traceId": "t",
        "type": "GENERATION",
        "startTime": TIME,
        "model": "m",
        "input": {"messages": MESSAGES, "tools": TOOLS},
        "output": {"role": "assistant", "content": "Deep."},
        "sessionId": "conv",
    },
    "Helicone": {
        "heliconeId": "x",
        "request_created_at": TIME,
        "request_user_id": "u",
        "request_properties": {"Helicone-Session-Id": "conv"},
        "request": {"body": BODY},
        "response": {"body": ANSWER},
    },
    "Helicone, as text": {"request_body": json.dumps(BODY), "response_body": "{}", "request_created_at": TIME},
    "OpenTelemetry span": {"name": "chat m", "attributes": SPAN},
    "OTLP export": {
        "resourceSpans": [
            {
                "scopeSpans": [
                    {
                        "spans": [
                            {"name": "chat m", "startTimeUnixNano": "1772359200000000000", "attributes": OTLP},
                            {"name": "GET /health", "attributes": []},
                        ]
                    }
                ]
            }
        ]
    },
    "SageMaker data capture": {
        "captureData": {
            "endpointInput": {**CAPTURED, "data": json.dumps(BODY), "encoding": "JSON"},
            "endpointOutput": {"data": json.dumps(ANSWER), "encoding": "JSON"},
        },
        "eventMetadata": EVENT,
        "eventVersion": "0",
    },
    "SageMaker, base64": {
        "captureData": {
            "endpointInput": {
                **CAPTURED,
                "data": base64.b64encode(json.dumps(BODY).encode()).decode(),
                "encoding": "BASE64",
            }
        },
        "eventMetadata": EVENT,
    },
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_chat_body_is_found_in_every_wrapping(name: str, tmp_path: Path) -> None:
    (request,) = read(write(tmp_path / "log.jsonl", WRAPPED[name]))
    assert request.messages == MESSAGES
    assert request.tools is not None
    assert request.tools[0]["function"]["name"] == "depth"
    assert request.model == "m" or "model" in json.dumps(WRAPPED[name])
    if TIME in json.dumps(WRAPPED[name]):
        assert request.timestamp == SECONDS


def test_what_stands_around_the_body_is_read_too(tmp_path: Path) -> None:
    (request,) = read(write(tmp_path / "log.jsonl", WRAPPED["Helicone"]))
    assert (request.session, request.tenant, request.timestamp) == ("conv", "u", SECONDS)
    assert request.output == "Deep."
    (request,) = read(write(tmp_path / "log.jsonl", WRAPPED["OTLP export"]))
    assert (request.session, request.timestamp, request.output_length) == ("conv", SECONDS, 7)


def test_salts_adapters_and_users_are_read(tmp_path: Path) -> None:
    body = {**BODY, "cache_salt": "s", "lora_name": "l", "user": "u", "session_id": "c"}
    (request,) = read(write(tmp_path / "log.jsonl", body))
    assert (request.salt, request.lora, request.tenant, request.session) == ("s", "l", "u", "c")
    assert request.namespace == ("m", "l", "s")


def test_tool_use_of_anthropic_becomes_tool_calls(tmp_path: Path) -> None:
    use = {"type": "tool_use", "id": "1", "name": "depth", "input": {"at": 3}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "11 km"}]}
    turns = [
        {"role": "user", "content": "Depth?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, use]},
        {"role": "user", "content": [result]},
    ]
    (request,) = read(write(tmp_path / "log.jsonl", {"model": "m", "messages": turns}))
    assert request.messages is not None
    assert [message["role"] for message in request.messages] == ["user", "assistant", "tool"]
    assert request.messages[1]["reasoning_content"] == "hm"
    assert request.messages[1]["tool_calls"][0]["function"] == {"name": "depth", "arguments": '{"at":3}'}
    assert request.messages[2]["content"] == "11 km"


def test_images_match_by_content(tmp_path: Path) -> None:
    def body(url: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        return {"messages": [{"role": "user", "content": parts}]}

    requests = read(write(tmp_path / "log.jsonl", body("data:a"), body("data:a"), body("data:b")))
    texts = [request.messages[0]["content"] for request in requests if request.messages]
    assert texts[0] == texts[1] != texts[2]
    assert "data:" not in texts[0]


@pytest.mark.parametrize("prompt", ["Once upon a time", ["Once upon a time"]])
def test_plain_prompts(prompt: Any, tmp_path: Path) -> None:
    (request,) = read(write(tmp_path / "log.jsonl", {"prompt": prompt, "model": "m"}))
    assert request.text == "Once upon a time"


@pytest.mark.parametrize("key", ["prompt", "prompt_token_ids", "input_ids", "token_ids"])
def test_token_ids(key: str, tmp_path: Path) -> None:
    (request,) = read(write(tmp_path / "log.jsonl", {key: [1, 2, 3]}))
    assert list(request.token_ids or ()) == [1, 2, 3]


def test_the_field_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {"a": {"b": [{"c": "Hello there"}]}, "prompt": "not this"})
    (request,) = read(path, field="a.b.0.c")
    assert request.text == "Hello there"
    with pytest.raises(TraceError, match=r"no field 'a\.x'"):
        read(path, field="a.x")


def test_vllm_log(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(
        "INFO 03-01 10:00:00 [api_server.py:1] Started server process [1]\n"
        "INFO 03-01 10:00:01 [logger.py:39] Received request cmpl-1: prompt: 'It\\'s\\nlate', "
        "params: SamplingParams(n=1), prompt_token_ids: None, lora_request: None.\n"
        'INFO 03-01 10:00:02 [logger.py:39] Received request cmpl-2: prompt: "Hi", params: SamplingParams(n=1), '
        "prompt_token_ids: [5, 6, 7], lora_request: LoRARequest(lora_name='sql', lora_int_id=1).\n"
    )
    first, second = read(path)
    assert (first.text, first.request_id) == ("It's\nlate", "cmpl-1")
    assert (list(second.token_ids or ()), second.lora) == ([5, 6, 7], "sql")
    assert first.timestamp is not None
    assert second.timestamp == first.timestamp + 1


def test_vllm_log_of_today(tmp_path: Path) -> None:
    """As vLLM 0.32 writes it: the prompt in a line of its own, at DEBUG."""
    path = tmp_path / "vllm.log"
    path.write_text(
        "(APIServer pid=7) DEBUG 03-01 10:00:01 [request_logger.py:55] Request cmpl-1-0 details: prompt: 'Hi there', "
        "prompt_token_ids: [5, 6], prompt_embeds shape: None.\n"
        "(APIServer pid=7) INFO 03-01 10:00:01 [request_logger.py:65] Received request cmpl-1-0: params: "
        "SamplingParams(n=1), lora_request: None.\n"
    )
    (request,) = read(path)
    assert (request.request_id, list(request.token_ids or ())) == ("cmpl-1-0", [5, 6])
    path.write_text(
        "INFO 03-01 10:00:01 [x.py:1] Received request a: params: SamplingParams(n=1), lora_request: None.\n"
    )
    with pytest.raises(TraceError, match="--log-level DEBUG"):
        read(path)


SGLANG_EVENTS = [
    {"event": "request.received.openai", "obj": BODY},
    {"event": "request.received", "rid": "r1", "obj": {"rid": "r1", "text": None, "input_ids": [1, 2, 3]}},
    {"event": "request.finished", "rid": "r1", "obj": {"rid": "r1", "text": "How", "input_ids": [1, 2, 3]}, "out": {}},
    {"event": "request.received", "rid": "r2", "obj": {"rid": "r2", "text": "Hello", "input_ids": None}},
]


@pytest.mark.parametrize("prefix", ["", "[2026-03-01 10:00:00] "])
def test_sglang_json_log(prefix: str, tmp_path: Path) -> None:
    """Each request once, though it is logged as received (twice, by the OpenAI route) and as finished."""
    path = tmp_path / "sglang.log"
    lines = [prefix + json.dumps({"timestamp": "2026-03-01T10:00:00.5", **event}) for event in SGLANG_EVENTS]
    path.write_text("\n".join(lines))
    first, second = read(path)
    assert (first.request_id, list(first.token_ids or ()), first.timestamp) == ("r1", [1, 2, 3], SECONDS + 0.5)
    assert second.text == "Hello"


@pytest.mark.parametrize(
    "line",
    [
        "[2026-03-01 10:00:00] Receive: obj=GenerateReqInput(rid='r', text='abc' ... 'xyz', input_ids=None)",
        "[2026-03-01 10:00:00] Receive: obj=GenerateReqInput(rid='r', text=None, input_ids=[1, 2] ... [8, 9])",
        json.dumps({
            "timestamp": "2026-03-01T10:00:00", "event": "request.received", "rid": "r",
            "obj": {"text": "a" * 1024 + "..." + "b" * 1024, "input_ids": None},
        }),
    ],
)  # fmt: skip
def test_prompts_that_sglang_cut_are_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    path.write_text(line + "\n")
    with pytest.raises(TraceError, match="--log-requests-level 3"):
        read(path)


@pytest.mark.parametrize("key", ["observations", "data"])
def test_all_calls_of_a_langfuse_trace_are_read(key: str, tmp_path: Path) -> None:
    def call(number: int) -> dict[str, Any]:
        return {"id": f"o{number}", "type": "GENERATION", "startTime": TIME, "input": MESSAGES, "model": "m"}

    steps = [{"id": "s", "type": "SPAN", "input": {"prompt": "not a call"}}, *map(call, range(6))]
    requests = read(write(tmp_path / "trace.json", {"id": "t", "sessionId": "conv", "userId": "u", key: steps}))
    assert [request.request_id for request in requests] == [f"o{number}" for number in range(6)]
    assert {(request.session, request.tenant, request.timestamp) for request in requests} == {("conv", "u", SECONDS)}


def test_sglang_log(tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    path.write_text(
        "[2026-03-01 10:00:00] Receive: obj=GenerateReqInput(rid='r1', text='Hello', input_ids=None, stream=False)\n"
        "[2026-03-01 10:00:01] Finish: obj=GenerateReqInput(rid='r1'), out={'text': 'x'}\n"
        "[2026-03-01 10:00:02] Receive: obj=GenerateReqInput(rid='r2', text=None, input_ids=[1, 2], stream=False)\n"
    )
    reader = LogReader(path)
    first, second = list(reader)
    assert (first.text, first.timestamp) == ("Hello", SECONDS)
    assert list(second.token_ids or ()) == [1, 2]
    assert reader.report.other_lines == 1


def test_mooncake_and_plain_hash_traces(tmp_path: Path) -> None:
    mooncake = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
    (request,) = read(write(tmp_path / "m.jsonl", mooncake))
    assert (request.timestamp, request.block_size, request.input_length) == (3.0, 512, 700)
    (request,) = read(write(tmp_path / "p.jsonl", {**mooncake, "block_size": 256}))
    assert request.block_size == 256


def test_bailian_chats_are_followed_to_their_root(tmp_path: Path) -> None:
    shared = {"output_length": 5, "type": "text"}
    turns = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 2.5, "input_length": 40, "hash_ids": [1, 2, 3], **shared},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 9.5, "input_length": 60, "hash_ids": [1, 2, 4], **shared},
    ]
    first, second = read(write(tmp_path / "b.jsonl", *turns))
    assert (first.block_size, first.timestamp) == (16, 2.5)
    assert first.session == second.session == "1"


def test_conversations_of_kv_cache_tester(tmp_path: Path) -> None:
    subagent = {"type": "subagent", "agent_id": "a", "requests": [{"t": 1.0, "in": 64, "out": 4, "hash_ids": [1]}]}
    asked = {"t": 0.0, "type": "s", "in": 130, "out": 4, "hash_ids": [1, 2, 3]}
    weka = {"id": "c", "block_size": 64, "hash_id_scope": "local", "requests": [asked, subagent]}
    parent, child = read(write(tmp_path / "w.jsonl", weka))
    assert (parent.block_size, parent.input_length) == (64, 130)
    assert parent.session != child.session
    assert parent.hash_ids is not None
    assert child.hash_ids == parent.hash_ids[:1]


def test_a_pretty_printed_conversation_and_a_folder(tmp_path: Path) -> None:
    for name, start in (("a", 5.0), ("b", 0.0)):
        conversation = {"id": name, "block_size": 64, "requests": [{"t": start, "in": 64, "out": 1, "hash_ids": [1]}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(conversation, indent=2))
    assert [request.session for request in read(tmp_path)] == ["b", "a"]


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n",
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n",
        '{"timestamp": 1, "input_length": 500, "output_length": 20}\n',
    ],
)
def test_lengths_alone_are_refused_with_the_reason(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(LengthsOnlyError, match="lengths only"):
        read(tmp_path / "log")


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: zstandard.ZstdCompressor().compress(data)])
def test_compressed_logs(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(pack(json.dumps(BODY).encode() + b"\n"))
    (request,) = read(tmp_path / "log")
    assert request.messages == MESSAGES


def test_a_json_array_and_an_export_with_data(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([BODY, BODY]))
    (tmp_path / "d.json").write_text(json.dumps({"data": [BODY, BODY]}, indent=1))
    assert len(read(tmp_path / "a.json")) == len(read(tmp_path / "d.json")) == 2
