"""Summaries as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from caudex.bench.summary import Summary

WIDEST = 400


@dataclass(frozen=True, slots=True)
class Row:
    """A scene, the way it was played, its figures, and the figures its speed-up is reckoned against."""

    scene: str
    variant: str
    summary: Summary
    baseline: Summary | None = None


COLUMNS: dict[str, Callable[[Row], str]] = {
    "requests": lambda row: f"{row.summary.requests}" + (f" ({row.summary.errors} failed)" * bool(row.summary.errors)),
    "prompt\ntokens": lambda row: f"{row.summary.prompt_tokens:,}",
    "cached\ntokens": lambda row: "not told" if row.summary.cached_tokens is None else f"{row.summary.cached_tokens:,}",
    "hit\nrate": lambda row: "-" if row.summary.hit_rate is None else f"{row.summary.hit_rate:.1%}",
    "TTFT p50\ncold": lambda row: duration(row.summary.ttft_p50_cold),
    "TTFT p50\nhot": lambda row: duration(row.summary.ttft_p50_hot),
    "between\ntokens": lambda row: duration(row.summary.inter_token_p50),
    "tokens/s": lambda row: f"{row.summary.output_tokens_per_second:.0f}",
    "wall": lambda row: duration(row.summary.wall),
    "speed-up": lambda row: f"{row.baseline.wall / row.summary.wall:.1f}x" if row.baseline else "",
}


def show(title: str, variant: str, rows: Sequence[Row]) -> None:
    """Print rows on stdout, as wide as they need, since a cut figure is worse than a wrapped line.

    Args:
        title: above the table.
        variant: heading of the column that says how a scene was played.
        rows: in the order to be shown.
    """
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("scene")
    made.add_column(variant)
    for heading in COLUMNS:
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(row.scene, row.variant, *(cell(row) for cell in COLUMNS.values()))
    console = Console()
    console.width = max(console.width, console.measure(made, options=console.options.update(width=WIDEST)).maximum)
    console.print(made)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
