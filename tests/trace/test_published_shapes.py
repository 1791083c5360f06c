"""Log records with all the fields that their makers publish, so that the ones that matter are found among the others.

Sources: LiteLLM's StandardLoggingPayload specification and spend-log table, Helicone's request rows and its manual
logger, Langfuse's blob-storage field reference and API, OpenTelemetry's GenAI conventions (1.28 to 1.37; attributes,
span events and log events), OpenLLMetry's and OpenInference's attributes, SageMaker's capture files.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from caudex.trace.reader import LogReader
from caudex.trace.request import Request

SYSTEM = {"role": "system", "content": "You are a pilot."}
USER = {"role": "user", "content": "How deep?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "depth", "arguments": '{"at":3}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "11 km"}
MESSAGES: list[dict[str, Any]] = [SYSTEM, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
FUNCTION = {"name": "depth", "description": "Of water.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
BODY = {"model": "m", "messages": MESSAGES, "tools": [TOOL], "user": "u"}
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Deep."}}],
    "usage": {"prompt_tokens": 20, "completion_tokens": 3},
}
TIME = "2026-03-01T10:00:00.250Z"
SECONDS = 1772359200.25

PAYLOAD = {
    "id": "chatcmpl-1", "trace_id": "t1", "call_type": "acompletion", "cache_hit": None, "stream": True,
    "status": "success", "saved_cache_cost": 0.0, "startTime": SECONDS, "endTime": SECONDS + 1, "response_time": 0.65,
    "completionStartTime": SECONDS + 0.65, "model": "m", "response_cost": 0.0, "total_tokens": 23, "prompt_tokens": 20,
    "completion_tokens": 3, "request_tags": [], "end_user": "u", "api_base": "https://api", "model_group": "m",
    "model_id": "abc", "messages": MESSAGES, "response": ANSWER, "error_str": None,
    "model_parameters": {"temperature": 0, "tools": [TOOL], "user": "u"},
    "metadata": {
        "user_api_key_hash": "88dc", "user_api_key_team_id": "team", "user_api_key_user_id": "default_user_id",
        "requester_metadata": {"session_id": "conv"},
    },
    "hidden_params": {"model_id": "abc"}, "model_map_information": {"model_map_key": "m"},
}  # fmt: skip
SPEND = {
    "request_id": "chatcmpl-2", "call_type": "acompletion", "api_key": "88dc", "spend": 0.0, "total_tokens": 23,
    "prompt_tokens": 20, "completion_tokens": 3, "startTime": TIME, "endTime": TIME, "model": "m", "model_id": "abc",
    "user": "default_user_id", "metadata": '{"user_api_key": "88dc"}', "cache_hit": "False", "request_tags": "[]",
    "team_id": "team", "end_user": "u", "session_id": "conv", "messages": json.dumps(MESSAGES),
    "response": json.dumps(ANSWER), "proxy_server_request": json.dumps(BODY),
}  # fmt: skip
CALLBACK = {
    "model": "m", "messages": MESSAGES, "optional_params": {"stream": False, "tools": [TOOL]}, "call_type": "x",
    "start_time": "2026-03-01 10:00:00.250000", "input": MESSAGES, "litellm_call_id": "z",
    "litellm_params": {
        "metadata": {"user_api_key_user_id": "u"},
        "proxy_server_request": {"url": "/", "method": "POST", "headers": {"x-session-id": "conv"}, "body": BODY},
    },
}  # fmt: skip
HELICONE = {
    "response_id": "r", "response_created_at": TIME, "response_body": ANSWER, "response_status": 200,
    "response_model": "m", "request_id": "9a", "request_created_at": TIME, "country_code": "DE", "request_body": BODY,
    "request_path": "/v1/chat/completions", "request_user_id": "u", "request_model": "m", "provider": "OPENAI",
    "request_properties": {"Helicone-Session-Id": "conv", "Helicone-Session-Name": "n"}, "delay_ms": 750,
    "llmSchema": {"request": {"llm_type": "chat", "messages": [{**USER, "_type": "message"}]}, "response": {}},
    "properties": {"Helicone-Session-Id": "conv"}, "scores": {}, "total_tokens": 23, "signed_body_url": "https://x",
}  # fmt: skip
HELICONE_LOGGER = {
    "providerRequest": {
        "url": "custom-model-nopath", "json": BODY, "meta": {"Helicone-User-Id": "u", "Helicone-Session-Id": "conv"},
    },
    "providerResponse": {"headers": {}, "status": 200, "json": ANSWER},
    "timing": {
        "startTime": {"seconds": 1772359200, "milliseconds": 250}, "endTime": {"seconds": 1772359201, "milliseconds": 0}
    },
}  # fmt: skip
LANGFUSE_ROW = {
    "id": "o1", "trace_id": "t1", "project_id": "p", "environment": "default", "type": "GENERATION",
    "parent_observation_id": None, "start_time": "2026-03-01 10:00:00.250000", "end_time": "2026-03-01 10:00:01",
    "name": "chat", "metadata": {"a": "b"}, "level": "DEFAULT", "input": json.dumps(BODY), "output": json.dumps(ANSWER),
    "provided_model_name": "m", "model_parameters": '{"temperature":1}', "user_id": "u", "session_id": "conv",
    "usage_details": {"input": 20, "output": 3, "total": 23}, "trace_name": "chat", "tags": [],
}  # fmt: skip
LANGFUSE_API = {
    "id": "o1", "traceId": "t1", "type": "GENERATION", "name": "OpenAI-generation", "startTime": TIME, "endTime": TIME,
    "model": "m", "modelParameters": {"temperature": 1}, "input": {"messages": MESSAGES, "tools": [TOOL]},
    "output": {"role": "assistant", "content": "Deep."}, "usageDetails": {"input": 20, "output": 3, "total": 23},
    "sessionId": "conv", "userId": "u",
}  # fmt: skip

PARTS = [
    {"role": "user", "parts": [{"type": "text", "content": "How deep?"}]},
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "depth", "arguments": {"at": 3}}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "11 km"}]},
]
STRUCTURED = {
    "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "m",
    "gen_ai.conversation.id": "conv", "enduser.id": "u", "gen_ai.usage.output_tokens": 3,
    "gen_ai.input.messages": PARTS, "gen_ai.system_instructions": [{"type": "text", "content": "You are a pilot."}],
    "gen_ai.tool.definitions": [{"type": "function", **FUNCTION}],
    "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "Deep."}]}],
}  # fmt: skip
SERIALISED = {key: json.dumps(value) if isinstance(value, list) else value for key, value in STRUCTURED.items()}
OPENLLMETRY = {
    "llm.request.type": "chat", "gen_ai.system": "OpenAI", "gen_ai.request.model": "m", "enduser.id": "u",
    "session.id": "conv",
    "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "You are a pilot.",
    "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": "How deep?",
    "gen_ai.prompt.2.role": "assistant", "gen_ai.prompt.2.tool_calls.0.id": "c1",
    "gen_ai.prompt.2.tool_calls.0.name": "depth", "gen_ai.prompt.2.tool_calls.0.arguments": '{"at":3}',
    "gen_ai.prompt.3.role": "tool", "gen_ai.prompt.3.tool_call_id": "c1", "gen_ai.prompt.3.content": "11 km",
    "llm.request.functions.0.name": "depth", "llm.request.functions.0.description": "Of water.",
    "llm.request.functions.0.parameters": '{"type":"object"}',
    "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "Deep.",
}  # fmt: skip
OPENINFERENCE = {
    "openinference.span.kind": "LLM", "llm.model_name": "m", "session.id": "conv", "user.id": "u",
    "llm.input_messages.0.message.role": "system", "llm.input_messages.0.message.content": "You are a pilot.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "How deep?",
    "llm.input_messages.2.message.role": "assistant",
    "llm.input_messages.2.message.tool_calls.0.tool_call.id": "c1",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "depth",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"at":3}',
    "llm.input_messages.3.message.role": "tool", "llm.input_messages.3.message.content": "11 km",
    "llm.input_messages.3.message.tool_call_id": "c1", "llm.tools.0.tool.json_schema": json.dumps(TOOL),
    "llm.output_messages.0.message.content": "Deep.", "llm.token_count.prompt": 20,
}  # fmt: skip
EVENTS = [
    {"name": "gen_ai.system.message", "attributes": {"content": "You are a pilot."}},
    {"name": "gen_ai.user.message", "attributes": {"gen_ai.event.content": '{"content": "How deep?"}'}},
    {"name": "gen_ai.assistant.message", "attributes": {"gen_ai.event.content": json.dumps({"tool_calls": [CALL]})}},
    {"name": "gen_ai.tool.message", "attributes": {"gen_ai.event.content": json.dumps(RESULT)}},
    {"name": "gen_ai.choice", "attributes": {"gen_ai.event.content": '{"message": {"content": "Deep."}}'}},
]


def typed(value: Any) -> dict[str, Any]:
    """A value as OTLP's JSON has it."""
    if isinstance(value, list):
        return {"arrayValue": {"values": [typed(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": key, "value": typed(inner)} for key, inner in value.items()]}}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


def record(attributes: dict[str, Any], **more: Any) -> dict[str, Any]:
    nanoseconds = {"startTimeUnixNano": "1772359200250000000", "timeUnixNano": "1772359200250000000"}
    return {
        "traceId": "5b8e", "spanId": "eee1", "name": "chat m", **nanoseconds, "kind": 3, "status": {}, **more,
        "attributes": [{"key": key, "value": typed(value)} for key, value in attributes.items()],
    }  # fmt: skip


def spans(attributes: dict[str, Any]) -> dict[str, Any]:
    scope = {"scope": {"name": "x"}, "spans": [record(attributes)]}
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]}


def sdk_span(attributes: dict[str, Any], **more: Any) -> dict[str, Any]:
    context = {"trace_id": "0x5b", "span_id": "0xee", "trace_state": "[]"}
    times = {"start_time": "2026-03-01T10:00:00.250000Z", "end_time": "2026-03-01T10:00:01.000000Z"}
    return {"name": "chat m", "context": context, **times, "attributes": attributes, "events": [], **more}


def captured(data: str, encoding: str) -> dict[str, Any]:
    about = {"observedContentType": "application/json", "encoding": encoding}
    answer = base64.b64encode(json.dumps(ANSWER).encode()).decode() if encoding == "BASE64" else json.dumps(ANSWER)
    return {
        "captureData": {
            "endpointInput": {"mode": "INPUT", "data": data, **about},
            "endpointOutput": {"mode": "OUTPUT", "data": answer, **about},
        },
        "eventMetadata": {"eventId": "e1", "customAttributes": ["session_id=conv"], "inferenceTime": TIME},
        "eventVersion": "0",
    }


KNOWN_WHO = {
    "LiteLLM StandardLoggingPayload": PAYLOAD,
    "LiteLLM spend log": SPEND,
    "LiteLLM spend log without messages": {**SPEND, "messages": "{}"},
    "LiteLLM callback": CALLBACK,
    "Helicone request row": HELICONE,
    "Helicone manual logger": HELICONE_LOGGER,
    "Langfuse blob storage": LANGFUSE_ROW,
    "Langfuse API": LANGFUSE_API,
    "OTLP spans, serialised": spans(SERIALISED),
    "OTLP spans, structured": spans(STRUCTURED),
    "OpenTelemetry SDK span": sdk_span(SERIALISED),
    "OpenLLMetry": sdk_span(OPENLLMETRY),
    "OpenInference": sdk_span(OPENINFERENCE),
}


def read(tmp_path: Path, value: Any) -> Request:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(value) + "\n")
    (request,) = LogReader(path)
    return request


def shown(request: Request) -> list[dict[str, Any]]:
    """Messages with absent content as empty: formats differ in it, templates do not."""
    return [{**message, "content": message.get("content") or ""} for message in request.messages or ()]


@pytest.mark.parametrize("name", KNOWN_WHO)
def test_messages_tools_and_who_asked_are_found(name: str, tmp_path: Path) -> None:
    request = read(tmp_path, KNOWN_WHO[name])
    assert shown(request) == MESSAGES
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["depth"]
    assert (request.model, request.session, request.tenant) == ("m", "conv", "u")
    assert request.timestamp == pytest.approx(SECONDS, abs=1e-3)


def test_every_log_record_of_an_export_is_read(tmp_path: Path) -> None:
    event = "gen_ai.client.inference.operation.details"
    records = [record({**STRUCTURED, "gen_ai.conversation.id": f"c{n}"}, eventName=event) for n in range(7)]
    other = record({"http.route": "/health"})
    export = {"resourceLogs": [{"scopeLogs": [{"logRecords": [*records, other]}]}]}
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(export) + "\n")
    assert [request.session for request in LogReader(path)] == [f"c{n}" for n in range(7)]


def test_messages_that_a_span_has_as_events(tmp_path: Path) -> None:
    request = read(tmp_path, sdk_span({"gen_ai.request.model": "m"}, events=EVENTS))
    assert shown(request) == MESSAGES


@pytest.mark.parametrize("encoding", ["JSON", "BASE64"])
def test_captured_chats_and_prompts(encoding: str, tmp_path: Path) -> None:
    def data(value: Any) -> str:
        text = json.dumps(value)
        return base64.b64encode(text.encode()).decode() if encoding == "BASE64" else text

    request = read(tmp_path, captured(data(BODY), encoding))
    assert (shown(request), request.timestamp) == (MESSAGES, SECONDS)
    prompt = {"inputs": "How deep is it?", "parameters": {"max_new_tokens": 9}}
    assert read(tmp_path, captured(data(prompt), encoding)).text == "How deep is it?"


def test_a_response_api_call_of_one_string_keeps_its_instructions(tmp_path: Path) -> None:
    request = read(tmp_path, {"model": "m", "instructions": "You are a pilot.", "input": "How deep?"})
    assert shown(request) == [SYSTEM, USER]


def test_a_trace_of_one_call_is_no_conversation(tmp_path: Path) -> None:
    """Tracers begin a trace for each call unless told otherwise, so that its id says nothing about who goes on."""
    assert read(tmp_path, {**PAYLOAD, "metadata": {}}).session is None
