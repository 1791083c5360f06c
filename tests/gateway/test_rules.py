from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caudex.gateway.rules import read_rules

from .conftest import RunningGateway, SmallWorker

CLOCK = {
    "rule": "move_slot",
    "site": "system message",
    "after": "Current time: ",
    "before": "\n# Policy",
    "to": "last message",
}


def apply(tmp_path: Path, rules: Any, body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(rules))
    rewritten, changed = read_rules(path).apply(json.dumps(body).encode())
    return json.loads(rewritten), changed


def chat(system: str, *turns: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": system}]
    messages += [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"model": "m", "messages": messages, **fields}


def test_a_clock_goes_to_the_end_and_leaves_the_same_beginning(tmp_path: Path) -> None:
    results = [
        apply(tmp_path, [CLOCK], chat(f"Current time: 10:0{i}\n# Policy\nBe kind.", "Hello"))[0] for i in range(3)
    ]
    assert len({result["messages"][0]["content"] for result in results}) == 1
    assert [result["messages"][1]["content"] for result in results] == [f"Hello\n10:0{i}" for i in range(3)]


def test_an_analyzers_report_is_a_rules_file(tmp_path: Path) -> None:
    report = {"version": 1, "breakers": [{"kind": "clock", "rule": CLOCK}, {"kind": "other", "rule": None}]}
    _, changed = apply(tmp_path, report, chat("Current time: now\n# Policy", "x"))
    assert changed == ["move_slot"]


def test_tools_and_their_keys_are_put_in_order(tmp_path: Path) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": {"b": 1, "a": 2}}},
        }
        for name in ("zoo", "ape")
    ]
    rules = [{"rule": "sort_tools", "by": "name"}, {"rule": "sort_tool_keys"}]
    one, changed = apply(tmp_path, rules, chat("s", "u", tools=tools))
    other, _ = apply(tmp_path, rules, chat("s", "u", tools=[dict(reversed(tool.items())) for tool in reversed(tools)]))
    assert changed == ["sort_tools", "sort_tool_keys"]
    assert json.dumps(one["tools"]) == json.dumps(other["tools"])
    assert [tool["function"]["name"] for tool in one["tools"]] == ["ape", "zoo"]


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_what_users_wrote_stays_and_rules_apply_once(turns: list[str]) -> None:
    from caudex.gateway.rules import PromptRules, _Rule

    rules = PromptRules([_Rule(**CLOCK)])
    body = json.dumps(chat("Current time: 1\n# Policy", *turns)).encode()
    once, changed = rules.apply(body)
    assert changed == ["move_slot"]
    contents = [message["content"] for message in json.loads(once)["messages"][1:]]
    assert contents == [*turns[:-1], turns[-1] + "\n1"]
    assert rules.apply(once) == (once, [])


def test_bodies_that_no_rule_concerns_keep_their_bytes() -> None:
    from caudex.gateway.rules import PromptRules, _Rule

    rules = PromptRules([_Rule(**CLOCK), _Rule("sort_tools")])
    for body in (b'{"prompt" : "x"}', b"not json", b"[1]", b'{"messages": 5, "tools": "x"}', b'{"messages": [1]}'):
        assert rules.apply(body) == (body, [])


@pytest.mark.parametrize("rules", ['[{"rule": "shout"}]', '[{"rule": "move_slot"}]', "{", '[{"rule": 5}]'])
def test_mistakes_in_a_rules_file_are_named(tmp_path: Path, rules: str) -> None:
    path = tmp_path / "rules.json"
    path.write_text(rules)
    with pytest.raises(ValueError, match=r"rules\.json"):
        read_rules(path)


def test_rules_bring_hits_through_the_gateway(
    tmp_path: Path, start_worker: Callable[[], SmallWorker], start_gateway: Callable[..., RunningGateway]
) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([CLOCK]))
    worker = start_worker()
    plain, mending = start_gateway([worker]), start_gateway([worker], "--rules", str(path))

    def cached(gateway: RunningGateway, tag: str) -> int:
        total = 0
        for i in range(4):
            body = chat(f"Current time: {tag}{i}\n# Policy {tag} " + "rules " * 300, f"question {i}")
            usage = gateway.client.post("/v1/chat/completions", json=body).json()["usage"]
            total += usage["prompt_tokens_details"]["cached_tokens"]
        return total

    assert cached(plain, "a") == 0
    assert cached(mending, "b") > 1_000
    assert mending.metric("caudex_gateway_prompt_rules_total", rule="move_slot") == 4
