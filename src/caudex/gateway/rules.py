"""Prompt rules: the analyzer's safe rewrites, applied to requests in flight.

A rules file is JSON: a list of rules, an object with `rules`, or a report of `caudex analyze --json`, whose breakers
carry theirs. Rules touch what the operator writes (system message, tools), never what a user wrote:

    {"rule": "sort_tools"}           tools in order of their names
    {"rule": "sort_tool_keys"}       keys of tool declarations in order
    {"rule": "move_slot", "site": "system message", "after": ..., "before": ..., "to": "last message"}
                                     what stands between two fixed texts goes to the end of the last message, to the
                                     start of the "first user message", or ("metadata") out of the prompt
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

_MARK = "…"
"""Stands where a value was, so that the text around it is the same in every request."""


class _Rule(msgspec.Struct):
    rule: str
    site: str = "system message"
    after: str = ""
    before: str = ""
    to: Literal["last message", "first user message", "metadata"] = "last message"


class _Breaker(msgspec.Struct):
    rule: _Rule | None = None


class _RulesFile(msgspec.Struct):
    rules: list[_Rule] = []
    breakers: list[_Breaker] = []


class PromptRules:
    """Rules in the order of their file. `applied` counts requests that each changed."""

    def __init__(self, rules: list[_Rule]) -> None:
        self._rules = [(rule, _move_pattern(rule)) for rule in rules]
        self.applied: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._rules)

    def apply(self, body: bytes) -> tuple[bytes, list[str]]:
        """The body with all rules applied, and the names of those that changed it; the same bytes if none did."""
        try:
            fields = msgspec.json.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return body, []
        if not isinstance(fields, dict):
            return body, []
        changed = [rule.rule for rule, pattern in self._rules if _apply(rule, pattern, fields)]
        self.applied.update(changed)
        return (msgspec.json.encode(fields), changed) if changed else (body, [])


def read_rules(path: Path) -> PromptRules:
    """ValueError names what is wrong with the file, or a rule that is not known."""
    data = path.read_bytes()
    try:
        if data.lstrip()[:1] == b"[":
            rules = msgspec.json.decode(data, type=list[_Rule])
        else:
            read = msgspec.json.decode(data, type=_RulesFile)
            rules = read.rules + [breaker.rule for breaker in read.breakers if breaker.rule is not None]
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error
    for rule in rules:
        if rule.rule not in ("sort_tools", "sort_tool_keys", "move_slot"):
            raise ValueError(f"{path}: unknown rule {rule.rule!r}; known: sort_tools, sort_tool_keys, move_slot")
        if rule.rule == "move_slot" and (rule.site != "system message" or not (rule.after or rule.before)):
            raise ValueError(f"{path}: move_slot needs a text after or before the slot, in the system message")
    return PromptRules(rules)


def _move_pattern(rule: _Rule) -> re.Pattern[str]:
    """The slot between its two neighbours; without one of them it reaches to that end of the text."""
    start = re.escape(rule.after) if rule.after else r"\A"
    end = re.escape(rule.before) if rule.before else r"\Z"
    return re.compile(f"({start})(.+?)({end})", re.DOTALL)


def _apply(rule: _Rule, pattern: re.Pattern[str], fields: dict[str, Any]) -> bool:
    if rule.rule == "move_slot":
        return _move(rule, pattern, fields.get("messages"))
    tools = fields.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return False
    ordered = sorted(tools, key=_tool_name) if rule.rule == "sort_tools" else [_with_sorted_keys(t) for t in tools]
    fields["tools"] = ordered
    return msgspec.json.encode(ordered) != msgspec.json.encode(tools)


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    named = function if isinstance(function, dict) else tool
    return str(named.get("name", ""))


def _with_sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_sorted_keys(value[key]) for key in sorted(value)}
    return [_with_sorted_keys(item) for item in value] if isinstance(value, list) else value


def _move(rule: _Rule, pattern: re.Pattern[str], messages: Any) -> bool:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    system = next((message for message in messages if message.get("role") == "system"), None)
    text = None if system is None else system.get("content")
    if system is None or not isinstance(text, str):
        return False
    found = pattern.search(text)
    if found is None or found[2] == _MARK:
        return False
    target = None if rule.to == "metadata" else _target(rule, messages)
    if rule.to != "metadata" and target is None:
        return False
    system["content"] = f"{text[: found.end(1)]}{_MARK}{text[found.start(3) :]}"
    if target is not None:
        value, content = found[2].strip(), target["content"]
        target["content"] = f"{content}\n{value}" if rule.to == "last message" else f"{value}\n{content}"
    return True


def _target(rule: _Rule, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Where the value goes; None where there is no message of plain text to take it, and the rule then does nothing."""
    if rule.to == "last message":
        candidate: dict[str, Any] | None = messages[-1]
    else:
        candidate = next((message for message in messages if message.get("role") == "user"), None)
    suits = candidate is not None and candidate.get("role") != "system" and isinstance(candidate.get("content"), str)
    return candidate if suits else None
