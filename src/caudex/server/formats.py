"""What an answer must look like: OpenAI's `response_format`, and vLLM's `structured_outputs` for all else."""

from __future__ import annotations

from typing import Any

import msgspec

from caudex.engine.types import GrammarKind, OutputGrammar
from caudex.server.errors import APIError

ANY_OBJECT = '{"type": "object"}'


class JSONSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JSONSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """One of them. `grammar` is llguidance's variant of Lark."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def output_grammar(
    response: ResponseFormat | None, structured: StructuredOutputs | None, calls: OutputGrammar | None = None
) -> OutputGrammar | None:
    """The grammar that a request asks for, `calls` being that of the tools it must call; None where any text will do.

    Raises:
        APIError: 400; it asks for two, or for one of a kind there is none of.
    """
    wanted = structured_grammars(structured) + response_grammars(response) + ([] if calls is None else [calls])
    if len(wanted) > 1:
        kinds = ", ".join(grammar.kind for grammar in wanted)
        raise APIError(f"the answer is to follow {kinds}; ask for one of them", param="structured_outputs")
    return wanted[0] if wanted else None


def response_grammars(response: ResponseFormat | None) -> list[OutputGrammar]:
    if response is None or response.type == "text":
        return []
    if response.type == "json_object":
        return [OutputGrammar("json_schema", ANY_OBJECT, "response_format")]
    if response.type == "json_schema" and response.json_schema is not None:
        return [OutputGrammar("json_schema", as_text(response.json_schema.schema), "response_format")]
    raise APIError(
        f"response_format.type is {response.type!r}; expected 'text', 'json_object', or 'json_schema' and one",
        param="response_format",
    )


def structured_grammars(structured: StructuredOutputs | None) -> list[OutputGrammar]:
    if structured is None:
        return []
    asked: list[tuple[GrammarKind, Any]] = [
        ("json_schema", structured.json),
        ("regex", structured.regex),
        ("choice", structured.choice),
        ("lark", structured.grammar),
    ]
    return [OutputGrammar(kind, as_text(value), "structured_outputs") for kind, value in asked if value is not None]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
