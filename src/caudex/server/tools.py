"""The tools of a chat request: what is a tool, which of them must be called, and the grammar of such an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from caudex.engine.types import OutputGrammar
from caudex.server.errors import APIError
from caudex.server.tool_calls import CLOSE, OPEN

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How chat templates print the arguments of past calls. An answer written alike is found in the cache a turn later, and
cannot fill its length with spaces."""


def functions_of(tools: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each function's parameters, by its name.

    Raises:
        APIError: 400; a tool is no function, or has no name or no schema.
    """
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise APIError(f"tools[{index}] is {tool!r:.80}; expected type 'function' and a function", param="tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise APIError(f"tools[{index}].function.name is {name!r:.80}; expected a name", param="tools")
        if parameters is not None and not isinstance(parameters, dict):
            raise APIError(f"tools[{index}].function.parameters is no JSON schema: {parameters!r:.80}", param="tools")
        functions[name] = parameters or NO_PARAMETERS
    return functions


def forced_functions(
    choice: str | Mapping[str, Any] | None, functions: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Of `functions`, those that the answer must call one of by `tool_choice`; empty where it need not call any.

    Raises:
        APIError: 400; the choice is none there is, or there is nothing to choose from.
    """
    if choice in (None, "auto", "none"):
        return {}
    if choice == "required":
        if not functions:
            raise APIError("tool_choice is 'required', but there are no tools", param="tool_choice")
        return dict(functions)
    name = named_function(choice)
    if name is None:
        raise APIError(
            f"tool_choice is {choice!r:.80}; expected 'auto', 'none', 'required', or "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise APIError(f"tool_choice names {name!r:.80}, but the tools are: {known:.200}", param="tool_choice")
    return {name: functions[name]}


def named_function(choice: object) -> str | None:
    """The name in a `tool_choice` that is an object."""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def calls_grammar(functions: Mapping[str, dict[str, Any]], *, many: bool) -> OutputGrammar:
    """Calls of `functions` as the model was trained to write them: one, or with `many` one after another."""
    rules = [call_rule(f"call{index}", name, schema) for index, (name, schema) in enumerate(functions.items())]
    calls = " | ".join(f"call{index}" for index in range(len(functions)))
    more = ' ("\\n" call)*' if many else ""
    return OutputGrammar("lark", "\n".join([f"start: call{more}", f"call: {calls}", *rules]), "tools")


def call_rule(rule: str, name: str, schema: Mapping[str, Any]) -> str:
    opening = f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '
    arguments = json.dumps({**schema, "x-guidance": AS_TEMPLATES_WRITE})
    return f"{rule}: {json.dumps(opening)} {rule}_arguments {json.dumps('}' + chr(10) + CLOSE)}\n" + (
        f"{rule}_arguments: %json {arguments}"
    )
