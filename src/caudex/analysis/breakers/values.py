"""What kind of value a slot holds: a clock, an id, a name, or none that is known."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from caudex.analysis.align import FIRST_TOKEN_CHARACTER
from caudex.trace.bodies import parse_time

# Months in English, and in German, French, Spanish, Italian, Portuguese and Dutch where they begin otherwise.
_MONTHS = (
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sept?|oct|nov|dec|january|february|march|april|june|july|august|september|"
    r"october|november|december|januar|februar|märz|mai|juni|juli|oktober|dezember|janvier|février|mars|avril|juin|"
    r"juillet|août|septembre|octobre|novembre|décembre|enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|"
    r"octubre|noviembre|diciembre|gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|dicembre|janeiro|"
    r"fevereiro|março|maio|junho|julho|setembro|outubro|dezembro|januari|februari|maart|mei|augustus)\b"
)
_TIME_OF_DAY = re.compile(
    r"(?<![\d:])\d{1,2}:\d{2}(?::(\d{2}))?(?:[.,]\d+)?\s*(?:[ap]\.?m\.?)?|\b\d{1,2}[.h]\d{2}\b(?= ?uhr| ?h\b|$)",
    re.IGNORECASE,
)
_COMPACT_TIME = re.compile(r"\b20\d{2}(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])[T_-]?(?:[01]\d|2[0-3])[0-5]\d(\d{2})?Z?\b")
_ISO_DATE = re.compile(r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\b\d{1,2}[-/.]\d{1,2}[-/.]\d{4}\b")
_WORD_DATE = re.compile(
    rf"\b{_MONTHS}\.? \d{{1,2}}\b|\b\d{{1,2}}(?:st|nd|rd|th|er|º)?\b.{{0,4}}\b{_MONTHS}", re.IGNORECASE
)
_WEEKDAY = re.compile(r"\b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b", re.IGNORECASE)
_MAX_COUNTER_STEP = 16
_MAX_YEARS_OF_A_LOG = 3
_MAX_PROFILE_CHARS = 160
_CLOCK_PART = re.compile(
    rf"(?:[\d\s.,:/+TZh-]|[ap]\.?m\b|st\b|nd\b|rd\b|th\b|{_MONTHS}|{_WEEKDAY.pattern})+", re.IGNORECASE
)
_EPOCH = re.compile(r"\b1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9}|\.\d+)?\b")
_UUID = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.IGNORECASE)
_HEX = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", re.IGNORECASE)
_MIXED_ID = re.compile(r"\b(?=\w*\d)(?=\w*[A-Za-z])\w{6,}\b")
_BIG_NUMBER = re.compile(r"\b\d{4,}\b")
_PROPER_NAME = re.compile(r"[A-Z][\w.&'-]{2,}(?: [A-Z][\w.&'-]*)*[.,;]?")
_CLOCK_WORDS = re.compile(
    r"\b(time|date|today|now|clock|timestamp|hour|day|uptime|zeit|uhr|datum|heute|heure|aujourd'hui|fecha|hora|hoy|ora|"
    r"oggi|hoje|tijd|vandaag)\b",
    re.IGNORECASE,
)
_ID_WORDS = re.compile(
    r"\b(request|trace|nonce|correlation|span|run|call|message|random|seed|uuid|id)\b", re.IGNORECASE
)
_SESSION_WORDS = re.compile(r"\b(session|conversation|chat|thread|ticket|case)\b", re.IGNORECASE)
_TENANT_WORDS = re.compile(
    r"\b(tenant|company|organi[sz]ation|org|account|workspace|team|client|brand)\b", re.IGNORECASE
)
_USER_WORDS = re.compile(
    r"\b(user|customer|name|helping|assisting|dear|hello|hi|talking|speaking|person|member|patient)\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ValueUse:
    """One request's value in a slot, and whose request it is."""

    value: str
    session: str | None
    tenant: str | None
    timestamp: float | None


@dataclass(frozen=True, slots=True)
class ValueKind:
    """`kind` is a breaker's kind; `per_session` says that a conversation keeps its value; `period` is for clocks."""

    kind: str
    per_session: bool
    period: str | None = None


def classify(uses: list[ValueUse], before: str, after: str = "") -> ValueKind:
    """The kind of value, from what the values look like, whom they go with, and the words around them."""
    values = [use.value.strip() for use in uses]
    distinct = set(values)
    per_session = _kept_by_session(uses)
    if any(character >= FIRST_TOKEN_CHARACTER for value in distinct for character in value[:1]):
        return ValueKind("varying_value", per_session)
    dated = share(_looks_like_clock, distinct) >= 0.8 or _is_epoch(distinct)
    if dated and not (per_session and _is_birthday(values)):
        return ValueKind("clock", per_session, _period(uses, before))
    if (
        _CLOCK_WORDS.search(f"{before[-40:]} {after[:12]}")
        and _is_rising(uses)
        and share(lambda v: bool(re.search(r"\d", v)), distinct) >= 0.8
    ):
        return ValueKind("clock", per_session, _period(uses, before))
    names = f"{before[-60:]} {after[:20]}"
    if per_session:
        return ValueKind(_owner_kind(uses, names, distinct), True)
    if is_random(distinct) or (len(distinct) >= 0.9 * len(values) and share(_is_one_word, distinct) >= 0.9):
        if _SESSION_WORDS.search(names):
            return ValueKind("session_id", False)
        return ValueKind("request_counter" if _is_counter(uses) else "request_id", False)
    if _is_function_of_tenant(uses):
        return ValueKind("tenant_name", False)
    if share(_is_short_word, distinct) >= 0.9 and not _tells_sessions(uses):
        if _USER_WORDS.search(names):
            return ValueKind("user_name", False)
        if _TENANT_WORDS.search(names):
            return ValueKind("tenant_name", False)
    return ValueKind("varying_value", False)


def _tells_sessions(uses: list[ValueUse]) -> bool:
    """Whether any conversation has several requests: what changes within one names neither its user nor its tenant."""
    sessions = [use.session for use in uses if use.session is not None]
    return len(set(sessions)) < len(sessions)


def _owner_kind(uses: list[ValueUse], names: str, distinct: set[str]) -> str:
    if _is_function_of_tenant(uses):
        return "user_name" if _USER_WORDS.search(names) else "tenant_name"
    if share(lambda value: len(value) <= _MAX_PROFILE_CHARS, distinct) < 0.8:
        return "varying_value"
    for kind, words in (("user_name", _USER_WORDS), ("tenant_name", _TENANT_WORDS), ("session_id", _SESSION_WORDS)):
        if words.search(names):
            return kind
    if share(lambda value: bool(_UUID.search(value) or _HEX.search(value) or _MIXED_ID.search(value)), distinct) >= 0.8:
        return "session_id"
    few = len(distinct) <= max(2, 0.4 * len({use.session for use in uses}))
    if few and share(lambda value: bool(_PROPER_NAME.fullmatch(value)), distinct) >= 0.9:
        return "tenant_name"
    return "user_name" if share(_is_short_word, distinct) >= 0.9 and not few else "varying_value"


def share(test: Callable[[str], bool], values: set[str]) -> float:
    return sum(map(test, values)) / max(len(values), 1)


def _looks_like_clock(value: str) -> bool:
    return (
        any(pattern.search(value) for pattern in (_TIME_OF_DAY, _ISO_DATE, _WORD_DATE, _WEEKDAY, _COMPACT_TIME))
        and len(value) <= 60
    )


def may_be_part_of_a_clock(values: set[str]) -> bool:
    """Whether these could be what varies of a date or a time: numbers, names of days and months, am and pm."""
    return share(lambda value: _CLOCK_PART.fullmatch(value.strip()) is not None, values) >= 0.8


def _is_birthday(values: list[str]) -> bool:
    """Whether these are dates of any year, in no order: a clock's are of the days of the log, and rise."""
    years = [int(year) for value in values for year in re.findall(r"\b(?:19|20)\d{2}\b", value)]
    return len(set(years)) > _MAX_YEARS_OF_A_LOG


def _is_epoch(distinct: set[str]) -> bool:
    return share(lambda value: bool(_EPOCH.search(value)), distinct) >= 0.8


def is_random(distinct: set[str]) -> bool:
    def looks_random(value: str) -> bool:
        return any(pattern.search(value) for pattern in (_UUID, _HEX, _MIXED_ID, _BIG_NUMBER)) and len(value) <= 120

    return share(looks_random, distinct) >= 0.8


def _is_one_word(value: str) -> bool:
    return _is_short_word(value) and len(value.split()) == 1


def _is_short_word(value: str) -> bool:
    return 0 < len(value) <= 48 and value.count(" ") <= 4 and "\n" not in value


def _kept_by_session(uses: list[ValueUse]) -> bool:
    """Whether conversations of two requests or more keep one value, and not all conversations the same."""
    values: dict[str, set[str]] = defaultdict(set)
    counts: dict[str, int] = defaultdict(int)
    for use in uses:
        if use.session is not None:
            values[use.session].add(use.value)
            counts[use.session] += 1
    longer = [session for session, count in counts.items() if count >= 2]
    if len(longer) < 2:
        return False
    kept = sum(len(values[session]) == 1 for session in longer)
    return kept >= 0.9 * len(longer)


def _is_function_of_tenant(uses: list[ValueUse]) -> bool:
    values: dict[str, set[str]] = defaultdict(set)
    for use in uses:
        if use.tenant is not None:
            values[use.tenant].add(use.value)
    return (
        len(values) >= 2 and all(len(found) == 1 for found in values.values()) and len({use.value for use in uses}) >= 2
    )


def _numbers(uses: list[ValueUse]) -> list[float]:
    found = [re.sub(r"\D", "", use.value) for use in uses]
    return [float(digits) for digits in found if digits and len(digits) <= 20]


def _is_rising(uses: list[ValueUse]) -> bool:
    numbers = _numbers(uses)
    rises = sum(b >= a for a, b in pairwise(numbers))
    return len(numbers) >= 0.8 * len(uses) and rises >= 0.95 * max(len(numbers) - 1, 1)


def _is_counter(uses: list[ValueUse]) -> bool:
    """Whether the numbers go up by little each time; requests of other applications may have counted between."""
    numbers = _numbers(uses)
    steps = sorted(b - a for a, b in pairwise(numbers))
    if not steps or len(numbers) < len(uses) or not _is_rising(uses):
        return False
    return steps[len(steps) // 2] <= _MAX_COUNTER_STEP


def _period(uses: list[ValueUse], before: str) -> str:
    """How often the clock ticks, from its finest part, or from how often the log saw it change."""
    values = {use.value for use in uses}
    timed = [found for value in values for pattern in (_TIME_OF_DAY, _COMPACT_TIME) if (found := pattern.search(value))]
    if any(found[1] for found in timed) or _is_epoch(values):
        return "second"
    minutes = {re.findall(r"\d{2}", found[0])[-1] for found in timed}
    if minutes:
        return "hour" if minutes <= {"00"} else "minute"
    if share(_looks_like_clock, values) >= 0.8:
        return "day"
    moments = [parse_time(use.timestamp) for use in uses if use.timestamp is not None]
    if len(moments) < 2 or moments[-1] is None or moments[0] is None:
        return "unknown"
    changes = sum(a.value != b.value for a, b in pairwise(uses))
    seconds = (moments[-1] - moments[0]) / max(changes, 1)
    return "second" if seconds < 30 else "minute" if seconds < 1800 else "hour" if seconds < 43200 else "day"
