"""Clean logs to plant breakers in, and the forms that a log may come in: messages, plain prompts, token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tests.analysis.plants.plant import Body

from caudex.analysis.analyze import DEFAULT_BLOCK_SIZE, analyze
from caudex.analysis.measure import Meter
from caudex.analysis.results import Analysis
from caudex.trace.chain import Int64Array
from caudex.trace.generate import WorkloadSettings, generate
from caudex.trace.log import open_log

_WORD = re.compile(r"\s?\w+|\s?[^\w\s]|\s+")


def generated(mix: str, requests: int, **settings: Any) -> list[Body]:
    """Bodies of generated workloads, without the names that would tell an analyzer what they are."""
    wanted = {"system_words": 250, "answer_words": 50, "turn_words": 30, "document_words": 300, "documents": 6}
    shares = dict.fromkeys(mix.split("+"), 1.0)
    bodies = generate(shares, WorkloadSettings(requests=requests, rate=0.2, **{**wanted, **settings}))
    return [{key: value for key, value in body.items() if key not in {"workload", "tenant"}} for body in bodies]


def as_text(body: Body) -> str:
    """A prompt as a program writes it that has no chat template: headings and blank lines."""
    if "prompt" in body:
        return str(body["prompt"])
    parts = []
    messages = body["messages"]
    if body.get("tools"):
        tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in body["tools"])
        messages = [messages[0], {"role": "tools", "content": tools}, *messages[1:]]
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else json.dumps(content)
        calls = "".join("\nCALL " + json.dumps(call["function"]) for call in message.get("tool_calls") or ())
        parts.append(f"### {message['role'].capitalize()}\n{text}{calls}\n\n")
    return "".join(parts) + "### Assistant\n"


def _kept(body: Body) -> Body:
    return {key: value for key, value in body.items() if key not in {"messages", "tools", "prompt"}}


def as_prompts(log: Iterable[Body]) -> list[Body]:
    return [{**_kept(body), "prompt": as_text(body)} for body in log]


def as_token_ids(log: Iterable[Body]) -> list[Body]:
    """Every word a token, numbered as met."""
    ids: dict[str, int] = {}
    return [
        {
            **_kept(body),
            "prompt_token_ids": [ids.setdefault(word, 1000 + len(ids)) for word in _WORD.findall(as_text(body))],
        }
        for body in log
    ]


FORMS: dict[str, Callable[[list[Body]], list[Body]]] = {
    "messages": list,
    "prompts": as_prompts,
    "token ids": as_token_ids,
}


def without_sessions(log: Iterable[Body]) -> list[Body]:
    return [{key: value for key, value in body.items() if key != "session_id"} for body in log]


def analyzed(log: list[Body], path: Any) -> Analysis:
    path.write_text("".join(json.dumps(body) + "\n" for body in log))
    return analyze(path, policies=["lru"], capacities=[1000])


def parting_tokens(log: list[Body], path: Any) -> Int64Array:
    """Where each request parts from all that came before it."""
    path.write_text("".join(json.dumps(body) + "\n" for body in log))
    opened = open_log(path)
    meter = Meter(opened.info, DEFAULT_BLOCK_SIZE, [])
    for batch in opened.batches:
        meter.add(batch)
    return meter.measured().exact_tokens


def has(log: list[Body]) -> set[str]:
    """What a log offers to plants (see `Plant.needs`)."""
    offers = set()
    if all("messages" in body for body in log):
        offers.add("messages")
        lengths = sorted(len(body["messages"]) for body in log)
        if lengths[3 * len(lengths) // 4] > 8:
            offers.add("turns")
        if sum(
            len(m.get("content") or "") > 100 for body in log for m in body["messages"] if m["role"] == "assistant"
        ) > len(log):
            offers.add("answers")
    if all(len(body.get("tools") or ()) > 2 for body in log):
        offers.add("tools")
    sessions = {body.get("session_id") for body in log}
    if 1 < len(sessions) < len(log):
        offers.add("sessions")
    return offers
