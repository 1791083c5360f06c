"""`tool_choice`: an answer that must be a call is one, of a function there is, with arguments that fit its schema."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says "hot" or }cold{.',
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "days": {"enum": [1, 2]}},
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": 'clo"ck\n'}}
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(server, **fields):
    messages = [{"role": "user", "content": "is it hot?"}]
    return server.openai.chat.completions.create(
        model="tiny", messages=messages, **{"max_tokens": 120, "temperature": 1, "seed": 2, **fields}
    )


def check(call) -> None:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(arguments) == {"unit", "days"}
        assert arguments["unit"] in "CF"
        assert arguments["days"] in (1, 2)
    else:
        assert (call.function.name, arguments) == ('clo"ck\n', {})


def test_a_named_function_is_called_once(server) -> None:
    for seed in range(4):
        choice = ask(server, tools=[CLOCK, WEATHER], tool_choice=NAMED, seed=seed).choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        check(call)
        assert choice.message.content is None
        assert choice.finish_reason == "stop"


def test_some_function_is_called(server) -> None:
    names = set()
    for seed in range(8):
        choice = ask(
            server, tools=[CLOCK, WEATHER], tool_choice="required", seed=seed, parallel_tool_calls=False
        ).choices[0]
        (call,) = choice.message.tool_calls
        check(call)
        names.add(call.function.name)
        assert choice.finish_reason == "tool_calls"
    assert names == {"weather", 'clo"ck\n'}


def test_several_calls_are_several(server) -> None:
    """After a call the model may end or, as it is made to here, begin another."""
    (newline,) = server.engine.tokenizer.encode("\n")
    asked = {"tools": [CLOCK], "tool_choice": "required", "max_tokens": 300, "logit_bias": {newline: 50}}
    calls = ask(server, **asked).choices[0].message.tool_calls
    assert len(calls) > 1
    for call in calls:
        check(call)
    assert len(ask(server, **asked, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_samples_and_streams_call_too(server) -> None:
    for choice in ask(server, tools=[WEATHER], tool_choice=NAMED, n=3).choices:
        check(choice.message.tool_calls[0])
    chunks = [chunk.choices[0] for chunk in ask(server, tools=[WEATHER], tool_choice=NAMED, stream=True)]
    (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    check(call)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "tide"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        (
            {"tools": [WEATHER], "tool_choice": NAMED, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_what_cannot_be_called_is_refused(server, fields: dict, param: str) -> None:
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", {"input": "hi"}), ("/v1/messages", {"messages": [], "max_tokens": 3})]
)
def test_paths_without_tools_say_so(server, path: str, body: dict) -> None:
    answer = server.post(path, **body, tools=[WEATHER])
    assert answer.status_code == 400
    assert "chat/completions" in answer.text
