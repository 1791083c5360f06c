"""Where prompt tokens come from, as shares that add up to one."""

from __future__ import annotations

from caudex.analysis.results import Analysis


def token_budget(analysis: Analysis) -> list[tuple[float, str, str]]:
    """(share, label, CSS class), the new tokens last. A log that knows no sessions has one share of repeated tokens."""
    repeated = analysis.repetition
    rest = [
        (repeated.token_hit_rate - repeated.hit_rate, "lost to rounding", "round"),
        (1 - repeated.token_hit_rate, "new", "new"),
    ]
    if not any(row.by == "session" for row in analysis.groups):
        return [(repeated.hit_rate, "repeated", "in"), *rest]
    sessions = [
        (repeated.in_session_hit_rate, "same session", "in"),
        (repeated.cross_session_hit_rate, "other sessions", "cross"),
    ]
    return [*sessions, *rest]
