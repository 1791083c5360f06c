"""Values that change: clocks in many spellings, ids, counters, names, facts of the day."""

from __future__ import annotations

import base64
import copy
import json
import random
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta

from tests.analysis.plants.plant import START, Body, Mutator, at_line, chosen_by_session, in_message, plant, session_of

_FIRST = ("Maria", "Jonas", "Aiko", "Priya", "Chen", "Fatima", "Liam", "Zoe", "Omar", "Ingrid", "Pablo", "Nkechi")
_LAST = ("Schmidt", "Okafor", "Tanaka", "Rossi", "Nguyen", "Haddad", "Kowalski", "Silva", "Larsen", "Dubois")
_WEATHER = ("sunny and dry", "light rain", "heavy snowfall", "patchy fog", "strong wind from the west", "overcast")
_MOVED = 0.012
"""A value of no known kind is moved behind what is shared, where it still takes a block or two of a short prompt."""

_COMPANIES = ("Acme Corp", "Globex", "Initech", "Umbrella")
_VIRTUES = ("kind", "quick", "calm", "clear", "brave", "exact", "frank", "patient")


def _seconds(number: int) -> datetime:
    return START + timedelta(seconds=7 * number)


def _minutes(number: int) -> datetime:
    return START + timedelta(minutes=number)


def _days(number: int) -> datetime:
    return START + timedelta(days=number // 3)


def _rng(number: int) -> random.Random:
    return random.Random(f"value {number}")


def _name(body: Body) -> str:
    rng = random.Random(session_of(body))
    return f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"


def _profile(body: Body) -> str:
    first, last = _name(body).split()
    rng = random.Random(session_of(body) + "profile")
    return (
        f"## User profile\nName: {first} {last}\nEmail: {first.lower()}.{last.lower()}@example.com\n"
        f"Member since: {rng.randrange(2009, 2025)}\nPlan: {rng.choice(('free', 'plus', 'gold'))}\n"
    )


def _profile_json(body: Body) -> str:
    rng = random.Random(session_of(body) + "json")
    born = f"{rng.randrange(1950, 2004)}-0{rng.randrange(1, 10)}-1{rng.randrange(10)}"
    return json.dumps({"name": _name(body), "tier": rng.choice(("gold", "silver")), "dob": born})


def _load(rng: random.Random) -> str:
    return f"cpu {rng.random():.3f} mem {rng.random():.3f} queue {rng.randrange(90)}"


def _ulid(number: int) -> str:
    return "01J" + "".join(_rng(number).choices("0123456789ABCDEFGHJKMNPQRSTVWXYZ", k=23))


def _in_tool(text_of: Callable[[int], str]) -> Mutator:
    def mutate(log: list[Body]) -> list[Body]:
        mutated = []
        for number, body in enumerate(log):
            tools = copy.deepcopy(body["tools"])
            tools[1]["function"]["description"] += text_of(number)
            mutated.append({**body, "tools": tools})
        return mutated

    return mutate


def _in_tool_default(log: list[Body]) -> list[Body]:
    mutated = []
    for number, body in enumerate(log):
        tools = copy.deepcopy(body["tools"])
        tools[0]["function"]["parameters"]["properties"]["as_of"] = {
            "type": "string", "default": f"{_minutes(number):%Y-%m-%dT%H:%MZ}",
        }  # fmt: skip
        mutated.append({**body, "tools": tools})
    return mutated


def _second_system_message(text_of: Callable[[int, Body], str]) -> Mutator:
    return lambda log: [
        {
            **body,
            "messages": [body["messages"][0], {"role": "system", "content": text_of(n, body)}, *body["messages"][1:]],
        }
        for n, body in enumerate(log)
    ]


def _in_first_user(line_of: Callable[[int], str]) -> Mutator:
    return lambda log: [
        in_message(body, 1, lambda text, n=n: f"{line_of(n)}\n{text}")  # type: ignore[misc]
        for n, body in enumerate(log)
    ]


def _reminder_before_last(log: list[Body]) -> list[Body]:
    """A system message with the time stands before the newest message, and is gone from the history later."""
    mutated = []
    for number, body in enumerate(log):
        reminder = {"role": "system", "content": f"The time is {_seconds(number):%H:%M:%S}. Answer in English only."}
        mutated.append({**body, "messages": [*body["messages"][:-1], reminder, body["messages"][-1]]})
    return mutated


_REMINDER = {"role": "system", "content": "Reminder: keep to the policy, be concise, and confirm before you book."}


def _last_stamped(log: list[Body]) -> list[Body]:
    """The newest message, whoever wrote it, has the time in front, and has it no more in the next request."""
    mutated = []
    for number, body in enumerate(log):
        messages = list(body["messages"])
        stamp = f"[{_seconds(number):%H:%M:%S}] "
        messages[-1] = {**messages[-1], "content": stamp + (messages[-1].get("content") or "")}
        mutated.append({**body, "messages": messages})
    return mutated


def _known_facts(log: list[Body]) -> list[Body]:
    """What the user said so far is told at the end of the system message, a line more with every turn."""
    mutated = []
    for body in log:
        said = [f"- said: {m['content'][:30]}" for m in body["messages"][1:-1] if m["role"] == "user"]
        facts = "\n".join(("", "Known facts:", *said)) if said else ""
        mutated.append(in_message(body, 0, lambda text, facts=facts: text + facts))  # type: ignore[misc]
    return mutated


def _state_of_the_task(log: list[Body]) -> list[Body]:
    def with_state(body: Body) -> Body:
        count = len(body["messages"])
        return in_message(body, 0, lambda text: f"{text}\nState: {count} messages, {count * 7} words.")

    return [with_state(body) for body in log]


def _context_json(number: int) -> str:
    return json.dumps({"locale": "en-GB", "now": int(_seconds(number).timestamp() * 1000), "channel": "web"})


_SYSTEM = r"^(system message|prompt|declaration|tools)"
_HEAD = r"^(system message|prompt), character ([0-9]|[1-9][0-9])$"

VALUES = [
    plant("iso_clock_head", "clock", _HEAD, at_line(lambda n, _: f"Current time: {_seconds(n):%Y-%m-%dT%H:%M:%SZ}", 0),
          "", period="second"),
    plant("minute_clock_middle", "clock", _SYSTEM, at_line(lambda n, _: f"(server time {_minutes(n):%H:%M})", 0.5), "",
          period="minute"),
    plant("day_clock_head", "clock", _HEAD, at_line(lambda n, _: f"Today is {_days(n):%A, %B %d, %Y}.", 0), "",
          period="day"),
    plant("german_clock", "clock", _SYSTEM,
          at_line(lambda n, _: f"Es ist Sonntag, der {_days(n).day}. März 2026, {_minutes(n):%H.%M} Uhr.", 0.3), ""),
    plant("slashed_us_clock", "clock", _HEAD, at_line(lambda n, _: f"{_minutes(n):%m/%d/%Y %I:%M %p}", 0), "",
          period="minute"),
    plant("rfc2822_clock", "clock", _HEAD, at_line(lambda n, _: f"Date: {_seconds(n):%a, %d %b %Y %H:%M:%S} +0000", 0),
          "", period="second"),
    plant("epoch_ms_in_json", "clock", _SYSTEM, at_line(lambda n, _: _context_json(n), 0.2), "", period="second"),
    plant("float_epoch", "clock", _HEAD, at_line(lambda n, _: f"t={_seconds(n).timestamp() + 0.25:.2f}", 0), ""),
    plant("compact_clock", "clock", _SYSTEM, at_line(lambda n, _: f"build-time {_seconds(n):%Y%m%dT%H%M%SZ}", 0.1), ""),
    plant("clock_in_tool_description", "clock", r"^declaration of tool",
          _in_tool(lambda n: f" Prices as of {_minutes(n):%d %b %Y %H:%M} UTC."), "tools", period="minute"),
    plant("clock_in_tool_default", "clock", r"^declaration of tool", _in_tool_default, "tools"),
    plant("clock_in_second_system", "clock", r"^system message 1",
          _second_system_message(lambda n, _: f"Session context.\nThe clock says {_seconds(n):%H:%M:%S}.")),
    plant("clock_in_first_user", "clock", r"^message 1 |^user message",
          _in_first_user(lambda n: f"<env>now={_seconds(n):%Y-%m-%d %H:%M:%S}</env>"), "messages turns"),
    plant("reminder_before_last", "history_inserted", r"^message \d+ \(system", _reminder_before_last,
          "messages turns"),
    plant("same_reminder_before_last", "history_inserted", r"^message \d+ \(system", lambda log: [
        {**b, "messages": [*b["messages"][:-1], _REMINDER, b["messages"][-1]]} for b in log], "messages turns"),
    plant("same_reminder_at_the_end", "history_inserted", r"^message \d+ \(system", lambda log: [
        {**b, "messages": [*b["messages"], _REMINDER]} for b in log], "messages turns"),
    plant("clock_on_the_newest", "clock", r"^message \d+", _last_stamped, "messages turns tools"),
    plant("facts_growing", "varying_value history_summarized", r"^system message", _known_facts, "messages turns"),
    plant("state_of_the_task", "varying_value request_counter", r"^system message", _state_of_the_task,
          "messages turns"),
    plant("traceparent", "request_id", _HEAD,
          at_line(lambda n, _: f"traceparent: 00-{_rng(n).getrandbits(128):032x}-{_rng(n).getrandbits(64):016x}-01", 0),
          ""),
    plant("base64_nonce", "request_id", _SYSTEM,
          at_line(lambda n, _: f"nonce: {base64.b64encode(_rng(n).randbytes(15)).decode()}", 0.4), ""),
    plant("ulid", "request_id", _HEAD, at_line(lambda n, _: f"[{_ulid(n)}]", 0), ""),
    plant("random_seed", "request_id", _SYSTEM,
          at_line(lambda n, _: f"Random seed: {_rng(n).randrange(10**5, 10**9)}", 0.2), ""),
    plant("short_ref", "request_id", _HEAD, at_line(lambda n, _: f"ref {_rng(n).randrange(16**5):05x}", 0), ""),
    plant("uuid_in_tool", "request_id", r"^declaration of tool",
          _in_tool(lambda n: f" (call key {uuid.UUID(int=_rng(n).getrandbits(128))})"), "tools"),
    plant("id_in_second_system", "request_id", r"^system message 1",
          _second_system_message(lambda n, _: f"X-Request-Id: {_rng(n).getrandbits(80):020x}")),
    plant("counter_middle", "request_counter", _SYSTEM,
          at_line(lambda n, _: f"Call no. {18240 + n} of this worker.", 0.5), ""),
    plant("user_name_head", "user_name", _HEAD, at_line(lambda _, b: f"You are talking to {_name(b)}.", 0),
          "sessions"),
    plant("user_email_middle", "user_name", _SYSTEM,
          at_line(lambda _, b: f"Logged-in user: {_name(b).lower().replace(' ', '.')}@example.com", 0.4), "sessions"),
    plant("user_profile_head", "user_name", _HEAD, at_line(lambda _, b: _profile(b), 0), "sessions"),
    plant("user_profile_json", "user_name", _HEAD, at_line(lambda _, b: _profile_json(b), 0), "sessions"),
    plant("user_id_head", "user_name session_id", _HEAD,
          at_line(lambda _, b: f"user_id=usr_{random.Random(session_of(b)).getrandbits(40):010x}", 0), "sessions"),
    plant("customer_number", "user_name session_id tenant_name", _SYSTEM,
          at_line(lambda _, b: f"Customer number: {random.Random(session_of(b)).randrange(10**6, 10**7)}", 0.2),
          "sessions"),
    plant("tenant_without_field", "tenant_name user_name", _HEAD,
          at_line(lambda _, b: f"You answer for {chosen_by_session(b, _COMPANIES)}.", 0),
          "sessions", 0.015),
    plant("session_uuid", "session_id", _SYSTEM,
          at_line(lambda _, b: f"conversation: {uuid.uuid5(uuid.NAMESPACE_DNS, session_of(b))}", 0.3), "sessions"),
    plant("weather", "varying_value system_prompt_versions", _HEAD,
          at_line(lambda n, _: f"Weather now: {_rng(n).choice(_WEATHER)}, {_rng(n).randrange(-9, 35)} degrees.", 0),
          "", _MOVED),
    plant("load_figures", "varying_value request_counter request_id", _SYSTEM,
          at_line(lambda n, _: _load(_rng(n)), 0.3), "", _MOVED),
    plant("quote_of_the_request", "varying_value", _HEAD,
          at_line(lambda n, _: "Motto: " + " ".join(_rng(n).sample(_VIRTUES, 5)), 0), "", _MOVED),
]  # fmt: skip
