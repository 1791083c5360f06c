"""Numbers as people read them."""

from __future__ import annotations


def percent(share: float) -> str:
    return f"{share:.1%}"


def count_text(count: float) -> str:
    """12,345 up to six digits; 14.1M and 2.3B beyond."""
    for limit, unit in ((1e9, "B"), (1e6, "M")):
        if count >= limit:
            return f"{count / limit:.1f}{unit}"
    return f"{count:,.0f}"


def bytes_text(count: float) -> str:
    for limit, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= limit:
            return f"{count / limit:,.1f} {unit}"
    return f"{count:,.0f} B"


def duration_text(seconds: float) -> str:
    for limit, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * limit:
            return f"{seconds / limit:,.0f} {unit}"
    return f"{seconds:,.0f} seconds"
