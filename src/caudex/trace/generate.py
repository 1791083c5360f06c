"""Seeded workloads: logs of the shapes that prefix caches meet, for benchmarks and what-ifs.

Conversations arrive as a Poisson process; which document, system prompt or tenant each one uses follows Zipf's law.
The same seed gives the same log, byte for byte, on any machine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

Body: TypeAlias = dict[str, Any]
Turn: TypeAlias = tuple[float, Body]
"""Seconds since the conversation's start, and the request's body."""

Conversation: TypeAlias = Callable[["Writer"], Iterator[Turn]]


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Sizes are in words (about 1.4 tokens each).

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    requests: int = 1000
    rate: float = 1.0
    """Conversations a second."""
    zipf: float = 1.1
    """Exponent of popularity; 0 makes all equally likely."""
    documents: int = 50
    tenants: int = 1
    system_words: int = 400
    turn_words: int = 60
    answer_words: int = 120
    document_words: int = 1200
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("documents", 1), ("tenants", 1), ("system_words", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if not self.rate > 0 or self.zipf < 0:
            raise ValueError(f"rate is {self.rate} and zipf is {self.zipf}; expected above 0 and at least 0")


_SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "lo", "mi", "na", "pe", "ri", "so", "tu", "va", "wen", "zor")


@dataclass(slots=True)
class Writer:
    """What a conversation is written with: random words, and texts shared by their number."""

    rng: random.Random
    settings: WorkloadSettings
    _popularity: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        ranks = range(1, self.settings.documents + 1)
        self._popularity = list(accumulate(rank**-self.settings.zipf for rank in ranks))

    def words(self, count: int, rng: random.Random | None = None) -> str:
        rng = rng or self.rng
        words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(count)]
        lines = [" ".join(words[start : start + 14]) for start in range(0, count, 14)]
        return ".\n".join(lines)

    def shared(self, kind: str, number: int, count: int) -> str:
        """The text called `kind` `number`: the same in every conversation."""
        return f"{kind} {number}\n" + self.words(count, random.Random(f"{self.settings.seed}/{kind}/{number}"))

    def popular(self) -> int:
        """A number below `documents`, small ones likelier by Zipf's law."""
        return self.rng.choices(range(self.settings.documents), cum_weights=self._popularity)[0]

    def pause(self, mean: float) -> float:
        return self.rng.expovariate(1 / mean)

    def system(self, number: int = 0) -> Body:
        return {"role": "system", "content": self.shared("Instructions", number, self.settings.system_words)}

    def user(self, count: int | None = None) -> Body:
        return {"role": "user", "content": self.words(count or self.settings.turn_words)}

    def assistant(self) -> Body:
        return {"role": "assistant", "content": self.words(self.settings.answer_words)}


def _chat(write: Writer) -> Iterator[Turn]:
    """Several turns on one system prompt, each adding to the last."""
    messages, time = [write.system(), write.user()], 0.0
    while True:
        yield time, {"messages": list(messages)}
        if write.rng.random() < 0.25 or len(messages) > 40:
            return
        messages += [write.assistant(), write.user()]
        time += write.pause(30)


def _rag(write: Writer) -> Iterator[Turn]:
    """One question on a document that others ask about too."""
    document = write.shared("Document", write.popular(), write.settings.document_words)
    question = write.words(write.settings.turn_words // 2)
    yield 0.0, {"messages": [write.system(), {"role": "user", "content": f"{document}\n\nQuestion: {question}"}]}


def _few_shot(write: Writer) -> Iterator[Turn]:
    """The same examples in front of every question."""
    examples = [write.shared("Example", number, 50) for number in range(8)]
    yield 0.0, {"prompt": "\n\n".join([*examples, f"Question: {write.words(30)}\nAnswer:"])}


def _self_consistency(write: Writer) -> Iterator[Turn]:
    """Eight samples of one prompt, close together."""
    body = {"messages": [write.system(), write.user(4 * write.settings.turn_words)]}
    for number in range(8):
        yield 0.05 * number, {**body, "seed": number}


def _tree_search(write: Writer) -> Iterator[Turn]:
    """Tree of thoughts: each of three steps tries three ways on, and goes on with the best."""
    messages, time = [write.system(), write.user(3 * write.settings.turn_words)], 0.0
    for _ in range(3):
        branches = [[*messages, write.assistant(), write.user(12)] for _ in range(3)]
        for branch in branches:
            yield time, {"messages": branch}
            time += 0.1
        messages = branches[write.rng.randrange(3)]
        time += write.pause(2)


def _agent(write: Writer) -> Iterator[Turn]:
    """Tool calls one after another, the history growing by call and result."""
    names = ("search", "read_file", "edit_file", "run_tests", "list_files")
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": write.shared("Tool", number, 40),
                "parameters": {
                    "type": "object",
                    "properties": {"argument": {"type": "string"}},
                    "required": ["argument"],
                },
            },
        }
        for number, name in enumerate(names)
    ]
    messages, time = [write.system(1), write.user(2 * write.settings.turn_words)], 0.0
    for step in range(write.rng.randint(4, 24)):
        yield time, {"messages": list(messages), "tools": tools}
        call_id = f"call_{step}"
        function = {"name": write.rng.choice(names), "arguments": f'{{"argument": "{write.words(4)}"}}'}
        call = {"id": call_id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": write.words(write.rng.randint(20, 400))})
        time += write.pause(6)


def _one_shot(write: Writer) -> Iterator[Turn]:
    """A prompt that shares nothing with any other: the traffic that washes a cache out."""
    yield 0.0, {"prompt": write.words(2 * write.settings.document_words)}


WORKLOADS: dict[str, Conversation] = {
    "chat": _chat,
    "rag": _rag,
    "few-shot": _few_shot,
    "self-consistency": _self_consistency,
    "tree-search": _tree_search,
    "agent": _agent,
    "one-shot": _one_shot,
}


def generate(mix: dict[str, float], settings: WorkloadSettings) -> Iterator[Body]:
    """Request bodies in order of time, each with `timestamp`, `session_id`, `request_id`, `model` and `tenant`.

    Args:
        mix: the share of conversations of each workload, by name.

    Raises:
        ValueError: a workload is unknown or a share is negative.
    """
    for name, share in mix.items():
        if name not in WORKLOADS or share < 0:
            raise ValueError(
                f"workload {name!r} with share {share}; known are {', '.join(WORKLOADS)}, shares at least 0"
            )
    rng = random.Random(settings.seed)
    names, weights = list(mix), list(mix.values())
    open_turns: list[tuple[float, int, Body, Iterator[Turn], float]] = []
    arrival, conversations, written = 0.0, 0, 0
    while written < settings.requests:
        if not open_turns or arrival <= open_turns[0][0]:
            kind = rng.choices(names, weights)[0]
            turns = WORKLOADS[kind](Writer(random.Random(rng.getrandbits(64)), settings))
            _push(open_turns, turns, arrival, conversations, _identity(kind, conversations, settings, rng))
            conversations += 1
            arrival += rng.expovariate(settings.rate)
            continue
        time, number, body, turns, start = heapq.heappop(open_turns)
        yield {"request_id": f"r{written}", "timestamp": round(time, 3), **body}
        written += 1
        identity = {key: body[key] for key in ("session_id", "tenant", "model", "workload")}
        _push(open_turns, turns, start, number, identity)


def _identity(kind: str, number: int, settings: WorkloadSettings, rng: random.Random) -> Body:
    return {
        "session_id": f"s{number}",
        "tenant": f"tenant-{rng.randrange(settings.tenants)}",
        "model": "generated",
        "workload": kind,
    }


def _push(
    queue: list[tuple[float, int, Body, Iterator[Turn], float]],
    turns: Iterator[Turn],
    start: float,
    number: int,
    identity: Body,
) -> None:
    following = next(turns, None)
    if following is not None:
        heapq.heappush(queue, (start + following[0], number, {**identity, **following[1]}, turns, start))
