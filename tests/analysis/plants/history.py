"""Histories that do not only grow: dropped, summarised, written over, given back otherwise."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from tests.analysis.plants.plant import Body, Mutator, plant


def _turns(change: Callable[[list[Body]], list[Body]]) -> Mutator:
    """Changes what comes after the first message."""
    return lambda log: [
        {**body, "messages": [body["messages"][0], *change(list(body["messages"][1:]))]} for body in log
    ]


def _by_budget(turns: list[Body]) -> list[Body]:
    """The newest turns that fit into 2,500 characters."""
    kept: list[Body] = []
    left = 2500
    for turn in reversed(turns):
        left -= len(turn.get("content") or "") + 40
        if left < 0 and kept:
            break
        kept.insert(0, turn)
    return kept


def _summarised(turns: list[Body]) -> list[Body]:
    if len(turns) <= 7:
        return turns
    said = "; ".join((turn.get("content") or "a call")[:24] for turn in turns[:-5])
    return [{"role": "system", "content": f"Recap of what was said before: {said}"}, *turns[-5:]]


def _summarised_middle(turns: list[Body]) -> list[Body]:
    """The first message stays; what is between it and the last four turns becomes a summary."""
    if len(turns) <= 7:
        return turns
    said = "; ".join((turn.get("content") or "a call")[:24] for turn in turns[1:-4])
    return [turns[0], {"role": "assistant", "content": f"(Summary of earlier steps: {said})"}, *turns[-4:]]


def _map_old(change: Callable[[Body], Body], fresh: int) -> Mutator:
    """Changes every turn but the last `fresh`."""
    return _turns(lambda turns: [change(turn) if n < len(turns) - fresh else turn for n, turn in enumerate(turns)])


def _text(roles: str, change: Callable[[str], str]) -> Callable[[Body], Body]:
    return lambda turn: (
        {**turn, "content": change(turn["content"])} if turn["role"] in roles.split() and turn.get("content") else turn
    )


def _thinking(log: list[Body]) -> list[Body]:
    """<think> in the newest assistant turn only."""
    mutated = []
    for body in log:
        messages = list(body["messages"])
        at = max((n for n, turn in enumerate(messages) if turn["role"] == "assistant"), default=None)
        if at is not None:
            thought = f"<think>\nThe user has said {len(messages)} things; next I " + "weigh what was asked and " * 20
            messages[at] = {**messages[at], "content": f"{thought}\n</think>\n\n{messages[at].get('content') or ''}"}
        mutated.append({**body, "messages": messages})
    return mutated


def _redacted(text: str) -> str:
    return re.sub(r"\b(\w)\w{5,}\b", r"\1***", text)


def _digest(text: str) -> str:
    return f"{random.Random(text).getrandbits(40):010x}"


def _images(log: list[Body]) -> list[Body]:
    """User turns carry an image while new; later it is taken out."""

    def with_image(turn: Body, key: str, keep: bool) -> Body:
        if turn["role"] != "user":
            return turn
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + key * 40}}
        parts = [{"type": "text", "text": turn["content"]}]
        return {**turn, "content": [*parts, picture] if keep else parts}

    return [
        {
            **body,
            "messages": [
                with_image(
                    turn,
                    f"{random.Random(turn.get('content') or '').getrandbits(40):010x}",
                    n >= len(body["messages"]) - 2,
                )
                for n, turn in enumerate(body["messages"])
            ],
        }
        for body in log
    ]


_TURN = r"^(message|paragraph) \d+"
_AGED = "messages turns"

HISTORY = [
    plant("oldest_dropped", "history_truncated", _TURN, _turns(lambda turns: turns[-6:]), _AGED),
    plant("oldest_dropped_by_budget", "history_truncated", _TURN, _turns(_by_budget), _AGED),
    plant("middle_dropped", "history_truncated", _TURN,
          _turns(lambda turns: turns if len(turns) <= 7 else [*turns[:1], *turns[-6:]]), _AGED),
    plant("middle_dropped_with_mark", "history_truncated", _TURN,
          _turns(lambda turns: turns if len(turns) <= 7 else
                 [*turns[:1], {"role": "user", "content": "[earlier messages omitted]"}, *turns[-6:]]), _AGED),
    plant("recap_in_front", "history_summarized", _TURN, _turns(_summarised), _AGED),
    plant("summary_in_the_middle", "history_summarized", _TURN, _turns(_summarised_middle), _AGED),
    plant("think_stripped", "reasoning_stripped", _TURN, _thinking, _AGED),
    plant("old_results_cut", "tool_results_cleared", _TURN,
          _map_old(_text("tool", lambda text: text[:80] + "... (truncated)" if len(text) > 120 else text), 4),
          "tools turns"),
    plant("old_results_dropped", "tool_results_cleared", _TURN,
          _map_old(_text("tool", lambda _: "[result removed to save space]"), 3), "tools turns"),
    plant("redacted_later", "history_rewritten", _TURN, _map_old(_text("user", _redacted), 2),
          "messages turns answers"),
    plant("digits_masked_later", "history_rewritten", _TURN,
          _map_old(_text("user", lambda text: re.sub(r"\d", "#", text)), 2), "messages turns answers"),
    plant("answers_stripped", "output_rewritten", _TURN,
          lambda log: _map_old(_text("assistant", str.strip), 1)(
              _map_old(_text("assistant", lambda text: text + " \n"), 0)(log)), _AGED),
    plant("old_users_collapsed", "whitespace_drift", _TURN,
          lambda log: _map_old(_text("user", lambda text: " ".join(text.split())), 3)(
              _map_old(_text("user", lambda text: text.replace(" ", "  ")), 0)(log)), _AGED),
    plant("old_answers_cut", "history_rewritten output_rewritten history_truncated", _TURN,
          _map_old(_text("assistant", lambda text: text[:60]), 3), "messages turns answers"),
    plant("images_removed", "history_rewritten", _TURN, _images, _AGED),
]  # fmt: skip
