"""How much a log repeats itself, in all and by tenant, model, session and hour."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from caudex.analysis.measure import Measured, in_flight_tokens
from caudex.analysis.tables import Table

TOP_GROUPS = 20


@dataclass(frozen=True, slots=True)
class Repetition:
    """Shares of all prompt tokens, for a cache that never evicts; see `caudex.analysis.measure` for the drawing."""

    hit_rate: float
    """Whole blocks of earlier prompts."""
    token_hit_rate: float
    """The same to the token: what partial hits bring on top."""
    with_output_hit_rate: float
    """Whole blocks, if generated tokens are cached as well."""
    in_session_hit_rate: float
    """What earlier requests of the same session give."""
    cross_session_hit_rate: float
    """What only other sessions give: `hit_rate` less `in_session_hit_rate`."""
    in_flight_rate: float
    """Computed twice at the same time: served by an infinite cache, but still being computed when asked for."""
    prefill_rate_assumed: float
    """Tokens a second, for `in_flight_rate`."""
    distinct_tokens: int


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One tenant, model, session or hour. `hit_rate` is the share of its own prompt tokens."""

    by: str
    name: str
    requests: int
    prompt_tokens: int
    hit_rate: float


def repetition(measured: Measured, prefill_rate: float) -> Repetition:
    hits = measured.rate(measured.hit_tokens)
    in_session = measured.rate(measured.in_session_tokens)
    return Repetition(
        hit_rate=hits,
        token_hit_rate=measured.rate(measured.exact_tokens),
        with_output_hit_rate=measured.rate(measured.with_output_tokens),
        in_session_hit_rate=in_session,
        cross_session_hit_rate=hits - in_session,
        in_flight_rate=in_flight_tokens(measured, prefill_rate) / max(measured.prompt_tokens, 1),
        prefill_rate_assumed=prefill_rate,
        distinct_tokens=measured.distinct_tokens,
    )


def groups(measured: Measured) -> Table[GroupRow]:
    """Repetition by tenant, model, session (the largest of each) and hour (all, in order), where the log has them."""
    rows: list[GroupRow] = []
    for by, names in (("tenant", measured.tenants), ("model", measured.models), ("session", measured.sessions)):
        if any(name is not None for name in names):
            rows.extend(_rows(by, names, measured)[:TOP_GROUPS])
    finite = np.isfinite(measured.timestamps)
    if finite.all() and len(finite):
        hours = (measured.timestamps // 3600).astype(np.int64).tolist()
        rows.extend(sorted(_rows("hour", hours, measured, _hour_name), key=lambda row: row.name))
    return Table(rows)


def _rows(by: str, names: Sequence[Hashable], measured: Measured, shown: Callable[[Any], str] = str) -> list[GroupRow]:
    codes: dict[Hashable, int] = {}
    coded = np.fromiter((codes.setdefault(name, len(codes)) for name in names), dtype=np.int64, count=len(names))
    counts = np.bincount(coded)
    tokens = np.bincount(coded, weights=measured.lengths)
    hits = np.bincount(coded, weights=measured.hit_tokens)
    rows = [
        GroupRow(
            by,
            "" if name is None else shown(name),
            int(counts[code]),
            int(tokens[code]),
            float(hits[code] / max(tokens[code], 1)),
        )
        for name, code in codes.items()
    ]
    return sorted(rows, key=lambda row: -row.prompt_tokens)


def _hour_name(hour: int) -> str:
    """An hour of the epoch as a date, or of a log that starts at zero as a count."""
    if hour < 24 * 365:
        return f"hour {hour:04d}"
    return datetime.fromtimestamp(hour * 3600, tz=UTC).strftime("%Y-%m-%d %H:00")
