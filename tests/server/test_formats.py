"""Answers that must follow a schema, a pattern or a choice."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


def chat(server, **fields) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "temperature": 1, "seed": 4, **fields}
    answer = server.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_json_schema(server) -> None:
    text = chat(server, response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}})
    parsed = json.loads(text)
    assert set(parsed) == {"ok", "kind"}
    assert parsed["kind"] in ("a", "b")


def test_any_json_object_begins_as_one(server) -> None:
    assert chat(server, response_format={"type": "json_object"}).lstrip().startswith("{")


def test_text_is_free(server) -> None:
    assert chat(server, response_format={"type": "text"}) == chat(server)


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}")],
)
def test_structured_outputs_on_both_paths(server, wanted: dict, pattern: str) -> None:
    assert re.fullmatch(pattern, chat(server, structured_outputs=wanted))
    answer = server.complete("hi", max_tokens=40, structured_outputs=wanted)
    assert re.fullmatch(pattern, answer["choices"][0]["text"])
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"choice": ["a"], "regex": "b"}},
        {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
    ],
)
def test_what_is_no_format_is_refused(server, fields: dict) -> None:
    answer = server.post("/v1/completions", prompt="hi", **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
