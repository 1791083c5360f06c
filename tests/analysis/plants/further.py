"""Breakers of the known kinds in places and shapes that the other plants do not have."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.analysis.plants.plant import START, Body, Mutator, at_line, in_head, in_message, plant, session_of

_SYSTEM = r"^(system message|prompt)"
_HEAD = r"^(system message|prompt), character ([0-9]|[1-9][0-9])$"
_TOOL = r"^(tools|declaration of tool)"
_TURN = r"^(message|paragraph) \d+"


def _rng(*parts: object) -> random.Random:
    return random.Random(repr(parts))


def _each_tool(change: Callable[[Any, int], Any]) -> Mutator:
    return lambda log: [
        {**body, "tools": [change(json.loads(json.dumps(tool)), n) for tool in body["tools"]]}
        for n, body in enumerate(log)
    ]


def _described(text_of: Callable[[int], str]) -> Mutator:
    def change(tool: Any, number: int) -> Any:
        tool["function"]["description"] = text_of(number) + tool["function"]["description"]
        return tool

    return _each_tool(change)


def _enum_shuffled(tool: Any, number: int) -> Any:
    """The same schema with `required` in another order."""
    parameters = tool["function"]["parameters"]
    required = list(parameters.get("required") or parameters.get("properties") or ())
    parameters["required"] = _rng(number, tool["function"]["name"]).sample(required, len(required))
    return tool


def _strict_comes_and_goes(tool: Any, number: int) -> Any:
    if _rng(number).random() < 0.5:
        tool["function"]["strict"] = True
    return tool


def _in_old_turns(role: str, change: Callable[[str, int, int], str], *, fresh: int = 1) -> Mutator:
    """Changes turns of a role in each request but the newest `fresh`, by text, place and number of the request."""

    def mutate(log: list[Body]) -> list[Body]:
        mutated = []
        for number, body in enumerate(log):
            messages = list(body["messages"])
            for at in range(1, len(messages) - fresh):
                if messages[at]["role"] == role and messages[at].get("content"):
                    messages[at] = {**messages[at], "content": change(messages[at]["content"], at, number)}
            mutated.append({**body, "messages": messages})
        return mutated

    return mutate


def _call_ids_new(log: list[Body]) -> list[Body]:
    """Calls and results of the history get new ids in every request, and a time in front of each result."""
    mutated = []
    for number, body in enumerate(log):
        messages = []
        for at, turn in enumerate(body["messages"]):
            if turn["role"] == "tool":
                turn = {**turn, "content": f"[call_{_rng(number, at).getrandbits(64):016x}] {turn.get('content')}"}
            messages.append(turn)
        mutated.append({**body, "messages": messages})
    return mutated


def _arguments_rewritten(log: list[Body]) -> list[Body]:
    """Old calls come back with their arguments serialised another way."""
    mutated = []
    for body in log:
        messages = list(body["messages"])
        for at in range(len(messages) - 2):
            if messages[at].get("tool_calls"):
                calls = []
                for call in messages[at]["tool_calls"]:
                    arguments = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True, indent=1)
                    calls.append({**call, "function": {**call["function"], "arguments": arguments}})
                messages[at] = {**messages[at], "tool_calls": calls}
        mutated.append({**body, "messages": messages})
    return mutated


def _greeting_time(log: list[Body]) -> list[Body]:
    """The time stands at the end of the newest user message and is taken out later."""
    mutated = []
    for number, body in enumerate(log):
        messages = list(body["messages"])
        at = max(n for n, turn in enumerate(messages) if turn["role"] == "user")
        stamp = f"\n\n(sent at {START + timedelta(seconds=11 * number):%Y-%m-%d %H:%M:%S})"
        messages[at] = {**messages[at], "content": (messages[at]["content"] or "") + stamp}
        mutated.append({**body, "messages": messages})
    return mutated


def _keep_newest(log: list[Body]) -> list[Body]:
    """A window of the ten newest messages, moved at every turn."""
    return [{**body, "messages": [body["messages"][0], *body["messages"][1:][-10:]]} for body in log]


def _reasoning_field(log: list[Body]) -> list[Body]:
    """`reasoning_content` on the newest assistant turn alone."""
    mutated = []
    for body in log:
        messages = list(body["messages"])
        at = max((n for n, turn in enumerate(messages) if turn["role"] == "assistant"), default=None)
        if at is not None:
            thought = "The user wants this done; the rules say to look it up first. " * 6 + str(at)
            messages[at] = {**messages[at], "reasoning_content": thought}
        mutated.append({**body, "messages": messages})
    return mutated


def _name_in_tools(log: list[Body]) -> list[Body]:
    def change(body: Body) -> Body:
        tools = json.loads(json.dumps(body["tools"]))
        user = f"{session_of(body)}-{_rng(session_of(body)).random():.6f}"
        tools[0]["function"]["description"] += f" Act for user {user}."
        return {**body, "tools": tools}

    return [change(body) for body in log]


def _nbsp(text: str, _: int, __: int) -> str:
    return re.sub(r"(?<=[.,]) ", "\u00a0", text)


def _json_facts(number: int) -> str:
    rng = _rng("facts", number)
    facts = {"locale": "en-US", "channel": "web", "currency": "USD", "beta": False, "tier": "standard"}
    return json.dumps(dict(rng.sample(list(facts.items()), len(facts))))


FURTHER = [
    plant("hour_clock_end", "clock", _SYSTEM,
          at_line(lambda n, _: f"Current hour: {START + timedelta(hours=n // 4):%Y-%m-%d %H}:00", 1), "messages turns"),
    plant("weekday_only", "clock", _HEAD, at_line(lambda n, _: f"It is {START + timedelta(days=n):%A}.", 0), ""),
    plant("iso_micro_with_zone", "clock", _HEAD,
          at_line(lambda n, _: f"<now>{(START + timedelta(milliseconds=1713 * n)).isoformat()}+02:00</now>", 0), "",
          period="second"),
    plant("twelve_hour_clock", "clock", _SYSTEM,
          at_line(lambda n, _: f"Local time is {START + timedelta(minutes=3 * n):%-I:%M %p}.", 0.6), "",
          period="minute"),
    plant("epoch_in_url", "clock", _SYSTEM,
          at_line(lambda n, _: f"Docs: https://example.com/help?v={1772359121 + 13 * n}", 0.3), "", period="second"),
    plant("uptime", "clock request_counter", _SYSTEM,
          at_line(lambda n, _: f"Server uptime: {86000 + 7 * n} s", 0.1), ""),
    plant("week_and_day", "clock", _HEAD,
          at_line(lambda n, _: f"Date: {START + timedelta(days=n // 5):%d.%m.%Y}", 0), "", period="day"),
    plant("clock_in_every_tool", "clock", _TOOL,
          _described(lambda n: f"({START + timedelta(seconds=5 * n):%H:%M:%S}) "), "tools", period="second"),
    plant("call_key_in_every_tool", "request_id", _TOOL,
          _described(lambda n: f"[trace {_rng(n).getrandbits(64):016x}] "), "tools"),
    plant("nanoid", "request_id", _HEAD,
          at_line(lambda n, _: "id:" + "".join(_rng(n).choices("abcdefghijkmnpqrtuvwxyzABCDEF-_23456", k=21)), 0), ""),
    plant("uuid_without_dashes", "request_id", _SYSTEM,
          at_line(lambda n, _: f"run={_rng(n).getrandbits(128):032X}", 0.7), ""),
    plant("four_digit_nonce", "request_id varying_value", _HEAD,
          at_line(lambda n, _: f"#{_rng(n).randrange(1000, 9999)}", 0), ""),
    plant("word_nonce", "request_id varying_value", _HEAD,
          at_line(lambda n, _: "salt " + "".join(_rng(n).choices("bcdfghjklmnpqrstvwxz", k=12)), 0), ""),
    plant("float_nonce", "request_id varying_value", _HEAD, at_line(lambda n, _: f"seed={_rng(n).random()}", 0), ""),
    plant("greeting_name", "user_name", _SYSTEM,
          at_line(lambda _, b: f"Hello {_rng(session_of(b)).choice(('Ann', 'Bo', 'Cy', 'Dee', 'Eve', 'Flo'))}"
                  f" {_rng(session_of(b), 2).choice(('Abel', 'Blum', 'Cruz', 'Dorn', 'Egan'))}, welcome back.", 0),
          "sessions", 0.012),
    plant("phone_number", "user_name session_id varying_value tenant_name", _SYSTEM,
          at_line(lambda _, b: f"Caller: +1-{_rng(session_of(b)).randrange(200, 999)}-555-"
                  f"{_rng(session_of(b)).randrange(1000, 9999)}", 0.2), "sessions"),
    plant("name_in_a_tool", "user_name session_id", _TOOL, _name_in_tools, "tools sessions"),
    plant("required_shuffled", "tool_keys_reordered", _TOOL, _each_tool(_enum_shuffled), "tools"),
    plant("strict_comes_and_goes", "system_prompt_versions varying_value tool_set_changing tool_keys_reordered", _TOOL,
          _each_tool(_strict_comes_and_goes), "tools"),
    plant("json_facts_reordered", "few_shot_reordered varying_value", _SYSTEM,
          at_line(lambda n, _: f"Context: {_json_facts(n)}", 0.2), "", 0.025),
    plant("result_ids_new", "request_id history_rewritten", _TURN, _call_ids_new, "tools turns"),
    plant("arguments_rewritten", "output_rewritten", _TURN, _arguments_rewritten, "tools turns"),
    plant("time_sent_removed", "history_rewritten history_truncated clock", _TURN, _greeting_time, "messages turns"),
    plant("sliding_window", "history_truncated", _TURN, _keep_newest, "messages turns"),
    plant("reasoning_field", "reasoning_stripped", _TURN, _reasoning_field, "messages turns"),
    plant("nbsp_in_old_answers", "output_rewritten", _TURN, _in_old_turns("assistant", _nbsp, fresh=2),
          "messages turns answers"),
    plant("answers_trimmed_of_markdown", "output_rewritten history_rewritten", _TURN,
          lambda log: _in_old_turns("assistant", lambda t, _, __: t.replace("**", ""), fresh=1)(
              _in_old_turns("assistant", lambda t, _, __: t.replace(". ", ".** ", 1), fresh=0)(log)),
          "messages turns answers"),
    plant("user_text_lowercased", "whitespace_drift history_rewritten", _TURN,
          _in_old_turns("user", lambda t, _, __: t.lower(), fresh=2), "messages turns answers"),
    plant("result_clock", "clock history_rewritten", _TURN,
          _in_old_turns("tool", lambda t, _, n: f"as of {START + timedelta(seconds=9 * n):%H:%M:%S}: {t}", fresh=0),
          "tools turns"),
    plant("prompt_release", "system_prompt_versions", _SYSTEM,
          lambda log: [in_head(b, lambda t, n=n: f"v{1 + 3 * n // len(log)}. {t}")  # type: ignore[misc]
                       for n, b in enumerate(log)], "messages", 0.02),
    plant("first_user_id", "request_id", r"^message 1|^user message",
          lambda log: [in_message(b, 1, lambda t, n=n: f"[{_rng(n).getrandbits(48):012x}] {t}")  # type: ignore[misc]
                       for n, b in enumerate(log)], "messages turns"),
]  # fmt: skip
