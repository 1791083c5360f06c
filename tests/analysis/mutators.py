"""Plants one labelled prefix breaker in a clean log of OpenAI chat bodies. Each mutator copies what it changes."""

from __future__ import annotations

import base64
import copy
import json
import random
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

Body = dict[str, Any]
Mutator = Callable[[list[Body]], list[Body]]

START = datetime(2026, 3, 1, 10, 0, 0)
EXAMPLES = [
    f"Example: a customer asks about a {word}; the agent looks it up, explains the {word} rules and offers two choices."
    for word in ("refund", "delay", "upgrade", "luggage", "voucher", "infant", "visa", "seat")
]
PASSAGES = [
    f"Passage on {word}: " + " ".join(f"{word} rule {n} says what staff must do in step {n}." for n in range(12))
    for word in ("refunds", "delays", "upgrades", "luggage", "vouchers", "infants", "visas", "seats")
]


def _with_system(body: Body, change: Callable[[str], str]) -> Body:
    messages = list(body["messages"])
    messages[0] = {**messages[0], "content": change(messages[0]["content"])}
    return {**body, "messages": messages}


def _insert(text: str, line: str, share: float) -> str:
    lines = text.split("\n")
    at = int(share * len(lines))
    return "\n".join([*lines[:at], line, *lines[at:]])


def _in_system(line_of: Callable[[int, Body], str], share: float) -> Mutator:
    return lambda log: [
        _with_system(body, lambda text, i=i, body=body: _insert(text, line_of(i, body), share))
        for i, body in enumerate(log)
    ]


def tools_described_with_clock(log: list[Body]) -> list[Body]:
    mutated = []
    for index, body in enumerate(log):
        tools = copy.deepcopy(body["tools"])
        tools[3]["function"]["description"] += f" Data as of {START + timedelta(seconds=index):%Y-%m-%d %H:%M:%S}."
        mutated.append({**body, "tools": tools})
    return mutated


def tool_keys_shuffled(log: list[Body]) -> list[Body]:
    rng = random.Random(1)

    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            keys = list(value)
            rng.shuffle(keys)
            return {key: shuffled(value[key]) for key in keys}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    return [{**body, "tools": [shuffled(tool) for tool in body["tools"]]} for body in log]


def tools_shuffled(log: list[Body]) -> list[Body]:
    rng = random.Random(2)
    return [{**body, "tools": rng.sample(body["tools"], len(body["tools"]))} for body in log]


def tools_chosen_by_request(log: list[Body]) -> list[Body]:
    rng = random.Random(3)
    return [{**body, "tools": [tool for tool in body["tools"] if rng.random() < 0.7] or body["tools"]} for body in log]


def few_shot_shuffled(log: list[Body]) -> list[Body]:
    rng = random.Random(4)

    def examples() -> str:
        return "\n\n".join(rng.sample(EXAMPLES, len(EXAMPLES)))

    return [_with_system(body, lambda text: f"{examples()}\n\n{text}") for body in log]


def numbered_few_shot_shuffled(log: list[Body]) -> list[Body]:
    rng = random.Random(5)

    def examples() -> str:
        order = rng.sample(EXAMPLES, len(EXAMPLES))
        return "\n\n".join(f"Example {n}: {text.removeprefix('Example: ')}" for n, text in enumerate(order, 1))

    return [_with_system(body, lambda text: f"{text}\n\n{examples()}") for body in log]


def retrieved_passages_shuffled(log: list[Body]) -> list[Body]:
    rng = random.Random(6)
    opening: dict[str, str] = {}
    mutated = []
    for body in log:
        session = body["session_id"]
        if session not in opening:
            opening[session] = "\n\n".join(rng.sample(PASSAGES, len(PASSAGES)))
        messages = list(body["messages"])
        messages[1] = {**messages[1], "content": f"{opening[session]}\n\nQuestion: {messages[1]['content']}"}
        mutated.append({**body, "messages": messages})
    return mutated


def few_shot_turns_shuffled(log: list[Body]) -> list[Body]:
    rng = random.Random(7)
    opening: dict[str, list[Body]] = {}
    mutated = []
    for body in log:
        session = body["session_id"]
        if session not in opening:
            order = rng.sample(PASSAGES, len(PASSAGES))
            opening[session] = [
                turn
                for text in order
                for turn in ({"role": "user", "content": text}, {"role": "assistant", "content": f"Noted: {text[:60]}"})
            ]
        messages = body["messages"]
        mutated.append({**body, "messages": [messages[0], *opening[session], *messages[1:]]})
    return mutated


def history_truncated(log: list[Body]) -> list[Body]:
    return [{**body, "messages": [body["messages"][0], *body["messages"][1:][-8:]]} for body in log]


def _summary(turns: list[Body]) -> str:
    said = " ".join((turn.get("content") or "")[:30] for turn in turns)
    return f"Summary of the conversation so far: {said}"


def history_summarized(log: list[Body]) -> list[Body]:
    mutated = []
    for body in log:
        system, *turns = body["messages"]
        if len(turns) > 8:
            turns = [{"role": "user", "content": _summary(turns[:-6])}, *turns[-6:]]
        mutated.append({**body, "messages": [system, *turns]})
    return mutated


def summary_in_system_message(log: list[Body]) -> list[Body]:
    """Turns that are dropped are told at the end of the system message, anew at every turn."""
    mutated = []
    for body in log:
        system, *turns = body["messages"]
        if len(turns) > 8:
            system = {**system, "content": f"{system['content']}\n\n{_summary(turns[:-6])}"}
            turns = turns[-6:]
        mutated.append({**body, "messages": [system, *turns]})
    return mutated


def nonce_in_the_last_but_one(log: list[Body]) -> list[Body]:
    """It stands behind the last but one message, and is gone from there in the next request."""
    mutated = []
    for index, body in enumerate(log):
        *turns, turn, last = body["messages"]
        nonce = f" [nonce {random.Random(index).getrandbits(64):016x}]"
        turn = turn if not turns else {**turn, "content": (turn.get("content") or "") + nonce}
        mutated.append({**body, "messages": [*turns, turn, last]})
    return mutated


def tool_results_cleared(log: list[Body]) -> list[Body]:
    def cleared(turn: Body, last: bool) -> Body:
        if turn["role"] != "tool" or last:
            return turn
        return {**turn, "content": "[old tool result cleared]"}

    return [
        {**body, "messages": [cleared(turn, i >= len(body["messages"]) - 4) for i, turn in enumerate(body["messages"])]}
        for body in log
    ]


def history_respaced(log: list[Body]) -> list[Body]:
    """User turns are trimmed and their blanks collapsed once they are no longer the last two."""

    def padded(turn: Body) -> Body:
        return turn if turn["role"] != "user" else {**turn, "content": turn["content"].replace(". ", ".  ") + " \n"}

    def trimmed(turn: Body) -> Body:
        return turn if turn["role"] != "user" else {**turn, "content": " ".join(turn["content"].split())}

    return [
        {
            **body,
            "messages": [
                body["messages"][0],
                *map(trimmed, body["messages"][1:-3]),
                *map(padded, body["messages"][1:][-3:]),
            ],
        }
        for body in log
    ]


def arguments_reserialized(log: list[Body]) -> list[Body]:
    """Calls come back with their arguments' JSON printed another way once they are two turns old."""

    def printed(turn: Body) -> Body:
        if not turn.get("tool_calls"):
            return turn
        calls = copy.deepcopy(turn["tool_calls"])
        for call in calls:
            call["function"]["arguments"] = json.dumps(
                json.loads(call["function"]["arguments"]), indent=1, sort_keys=True
            )
        return {**turn, "tool_calls": calls}

    return [{**body, "messages": [*map(printed, body["messages"][:-4]), *body["messages"][-4:]]} for body in log]


def reasoning_content_stripped(log: list[Body]) -> list[Body]:
    """Assistant turns carry `reasoning_content` while they are among the last four messages, and lose it later."""

    def thinking(turn: Body, index: int) -> Body:
        if turn["role"] != "assistant":
            return turn
        return {**turn, "reasoning_content": f"Let me think about step {index}. " * 12}

    return [
        {
            **body,
            "messages": [
                thinking(turn, i) if i >= len(body["messages"]) - 4 else turn for i, turn in enumerate(body["messages"])
            ],
        }
        for body in log
    ]


def clock_in_history(log: list[Body]) -> list[Body]:
    """The first user message is rendered anew, with the time, in every request."""
    mutated = []
    for index, body in enumerate(log):
        messages = list(body["messages"])
        now = f"{START + timedelta(seconds=7 * index):%H:%M:%S}"
        messages[1] = {**messages[1], "content": f"[now {now}] {messages[1]['content']}"}
        mutated.append({**body, "messages": messages})
    return mutated


def whitespace_drift(log: list[Body]) -> list[Body]:
    rng = random.Random(8)
    forms = [
        lambda t: t,
        lambda t: t.replace("\n\n", "\n"),
        lambda t: " " + t,
        lambda t: t.replace("\n- ", "\n* "),
        lambda t: t.replace(". ", ".  "),
    ]
    return [_with_system(body, rng.choice(forms)) for body in log]


def _edited(text: str, version: int) -> str:
    lines = text.split("\n")
    letter, team = (("A", "legal"), ("B", "sales"), ("C", "support"))[version]
    lines[0] = f"# Policy of the airline, in the wording of revision {letter} agreed with {team}"
    return "\n".join(lines)


def _revised(body: Body, version: int) -> Body:
    return _with_system(body, lambda text: _edited(text, version))


def ab_test(log: list[Body]) -> list[Body]:
    rng = random.Random(9)
    arm: dict[str, int] = {}
    return [_revised(body, arm.setdefault(body["session_id"], rng.randrange(3))) for body in log]


def ab_test_by_request(log: list[Body]) -> list[Body]:
    rng = random.Random(10)
    return [_revised(body, rng.randrange(3)) for body in log]


def salted_by_session(log: list[Body]) -> list[Body]:
    return [{**body, "cache_salt": f"salt-{body['session_id']}"} for body in log]


def salts_of_ten(log: list[Body]) -> list[Body]:
    return [{**body, "cache_salt": f"tenant-{random.Random(body['session_id']).randrange(10)}"} for body in log]


def lora_mix(log: list[Body]) -> list[Body]:
    return [{**body, "lora_name": f"adapter-{index % 4}"} for index, body in enumerate(log)]


def model_mix(log: list[Body]) -> list[Body]:
    return [{**body, "model": f"model-{index % 3}"} for index, body in enumerate(log)]


def tenant_head(log: list[Body]) -> list[Body]:
    names = ["Acme Air", "Blue Sky Travel", "Condor Lines", "Delta Tours", "Eagle Trips", "Fjord Flights"]
    tenant = {body["session_id"]: names[i % 6] for i, body in enumerate(log)}
    return [
        _with_system(
            {**body, "tenant": tenant[body["session_id"]]},
            lambda t, n=tenant[body["session_id"]]: f"You work for {n}.\n{t}",
        )
        for body in log
    ]


def _uuid(index: int) -> str:
    return str(uuid.UUID(int=random.Random(index).getrandbits(128), version=4))


MUTATORS: dict[str, tuple[Mutator, set[str]]] = {
    "clock_in_the_middle": (
        _in_system(lambda i, _: f"It is now {START + timedelta(minutes=i):%H:%M} in Boston.", 0.5),
        {"clock"},
    ),
    "clock_at_the_end": (
        _in_system(lambda i, _: f"Now: {START + timedelta(seconds=i):%A, %d %B %Y, %I:%M:%S %p}", 1.0),
        {"clock"},
    ),
    "clock_at_the_head": (
        _in_system(lambda i, _: f"The time is {START + timedelta(seconds=i):%Y-%m-%d %H:%M:%S}.", 0.0),
        {"clock"},
    ),
    "user_name_head": (
        _in_system(lambda _, b: f"The user is Ada {b['session_id'].upper()} Byron.", 0.0),
        {"user_name"},
    ),
    "epoch_at_the_head": (_in_system(lambda i, _: f"ts={1772359200 + i}", 0.0), {"clock"}),
    "clock_in_a_tool": (tools_described_with_clock, {"clock"}),
    "clock_in_history": (clock_in_history, {"clock"}),
    "uuid_at_the_head": (_in_system(lambda i, _: f"Request: {_uuid(i)}", 0.0), {"request_id"}),
    "nonce_in_the_middle": (
        _in_system(lambda i, _: f"<!-- {random.Random(i).getrandbits(64):016x} -->", 0.4),
        {"request_id"},
    ),
    "nonce_at_the_end": (
        _in_system(lambda i, _: f"nonce: {base64.b64encode(random.Random(i).randbytes(15)).decode()}", 1.0),
        {"request_id"},
    ),
    "user_name_at_the_end": (
        _in_system(lambda _, b: f"The user is Ada {b['session_id'].upper()} Byron.", 1.0),
        {"user_name"},
    ),
    "counter": (_in_system(lambda i, _: f"Request number {i}.", 0.0), {"request_counter"}),
    "session_id_head": (
        _in_system(lambda _, b: f"Session {uuid.uuid5(uuid.NAMESPACE_DNS, b['session_id'])}", 0.0),
        {"session_id"},
    ),
    "user_name_middle": (
        _in_system(lambda _, b: f"The customer is called Ada {b['session_id'].upper()} Lovelace.", 0.3),
        {"user_name"},
    ),
    "tenant_head": (tenant_head, {"tenant_name"}),
    "tools_shuffled": (tools_shuffled, {"tools_reordered"}),
    "tool_keys_shuffled": (tool_keys_shuffled, {"tool_keys_reordered"}),
    "tools_chosen_by_request": (tools_chosen_by_request, {"tool_set_changing"}),
    "few_shot_shuffled": (few_shot_shuffled, {"few_shot_reordered"}),
    "numbered_few_shot_shuffled": (numbered_few_shot_shuffled, {"few_shot_reordered"}),
    "retrieved_passages_shuffled": (retrieved_passages_shuffled, {"passages_reordered"}),
    "few_shot_turns_shuffled": (few_shot_turns_shuffled, {"few_shot_reordered"}),
    "history_truncated": (history_truncated, {"history_truncated"}),
    "history_summarized": (history_summarized, {"history_summarized"}),
    "summary_in_system_message": (summary_in_system_message, {"history_summarized"}),
    "nonce_in_the_last_but_one": (nonce_in_the_last_but_one, {"request_id"}),
    "tool_results_cleared": (tool_results_cleared, {"tool_results_cleared"}),
    "history_respaced": (history_respaced, {"whitespace_drift"}),
    "arguments_reserialized": (arguments_reserialized, {"output_rewritten"}),
    "reasoning_content_stripped": (reasoning_content_stripped, {"reasoning_stripped"}),
    "whitespace_drift": (whitespace_drift, {"whitespace_drift"}),
    "ab_test": (ab_test, {"system_prompt_versions"}),
    "ab_test_by_request": (ab_test_by_request, {"system_prompt_versions"}),
    "salted_by_session": (salted_by_session, {"cache_salt"}),
    "salts_of_ten": (salts_of_ten, {"cache_salt"}),
    "lora_mix": (lora_mix, {"lora_split"}),
    "model_mix": (model_mix, {"model_mix"}),
}
"""Name -> (mutator, kinds that name the breaker rightly)."""
