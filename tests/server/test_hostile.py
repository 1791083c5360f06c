"""Requests made to break the server: each gets a refusal that names the field, or an answer, and it lives on."""

from __future__ import annotations

import json

import httpx
import msgspec
import pytest

from caudex.server.anthropic import MessagesRequest
from caudex.server.chat import ChatRequest
from caudex.server.completions import CompletionRequest
from caudex.server.responses import ResponsesRequest
from caudex.server.tokens import DetokenizeRequest, TokenizeRequest

USER = [{"role": "user", "content": "hi"}]
PATHS = {
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 1}),
    "/v1/chat/completions": (ChatRequest, {"messages": USER, "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "hi", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"messages": USER, "max_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
VALUES = [
    *("true", "-1", "1e400", "NaN", "9223372036854775808", "1" + "0" * 400),
    *('"x"', '"\\u0000"', '"\\ud800"', '"' + "y" * 5000 + '"'),
    *("[]", "[null]", '[{"type": "function"}]', "[" * 900 + "]" * 900, "[" * 20_000, "[" + '"z",' * 5000 + '"z"]'),
    *("{}", '{"type": "x"}', '{"0": 1}', '{"a":' * 900 + "1" + "}" * 900),
    *('{"regex": "("}', '{"choice": []}', '{"grammar": ""}'),
]


def check(answer: httpx.Response) -> None:
    """A refusal has OpenAI's shape, names its field unless the body is no JSON, and is short."""
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] or error["code"] == "invalid_json", error
        assert 0 < len(error["message"]) <= 1000


@pytest.mark.parametrize("path", PATHS)
def test_no_value_of_any_field_does_harm(server, path: str) -> None:
    shape, rest = PATHS[path]
    for field in msgspec.structs.fields(shape):
        others = {name: value for name, value in rest.items() if name != field.name}
        for value in VALUES:
            body = json.dumps(others)[:-1] + (", " if others else "") + f'"{field.name}": {value}}}'
            check(server.http.post(path, content=body.encode()))


def test_everything_at_once(server) -> None:
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(2)]
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    every = {"messages": USER, "max_tokens": 4, "n": 8, "tools": tools, "response_format": schema, "prompt_logprobs": 5}
    check(server.post("/v1/chat/completions", **every, logprobs=True, top_logprobs=20, tool_choice="required"))
    answer = server.post("/v1/chat/completions", **every, logprobs=True, top_logprobs=20)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"multipleOf": 99999999977}}}),
        ("structured_outputs", {"regex": "(" * 5000}),
        ("structured_outputs", {"regex": "a" * 70_000}),
        ("structured_outputs", {"grammar": "start: " + "(" * 5000}),
        ("structured_outputs", {"choice": ["x"] * 40_000}),
        ("structured_outputs", {"choice": []}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "what"}}}]),
    ],
)
def test_a_grammar_that_cannot_be_compiled_names_its_field(server, field: str, value: object) -> None:
    pytest.importorskip("llguidance")
    choice = {"tool_choice": "required"} if field == "tools" else {}
    answer = server.post("/v1/chat/completions", messages=USER, max_tokens=1, **{field: value}, **choice)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field


def test_others_are_served_while_a_pattern_explodes(server) -> None:
    """A pattern within all limits that llguidance gives up on is refused when it does, and nobody else is."""
    pytest.importorskip("llguidance")
    plain = server.complete("hi", max_tokens=20)["choices"][0]["text"]
    bomb = {"prompt": "hi", "max_tokens": 30, "structured_outputs": {"regex": "a{1000000}"}}
    answer = server.post("/v1/completions", **bomb)
    check(answer)
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert server.complete("hi", max_tokens=20)["choices"][0]["text"] == plain
