"""Summaries as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from caudex.bench.summary import Summary

WIDTH = 120

HEADINGS = (
    "requests",
    "prompt\ntokens",
    "cached\ntokens",
    "hit\nrate",
    "TTFT p50\ncold",
    "TTFT p50\nhot",
    "between\ntokens",
    "tokens/s",
    "wall",
    "speed-up",
)


def table(rows: Sequence[tuple[str, Summary, Summary | None]], title: str) -> Table:
    """One row a summary: its label, its figures, and the wall time of its baseline, if it has one, over its own."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD)
    made.add_column("", no_wrap=True)
    for heading in HEADINGS:
        made.add_column(heading, justify="right", no_wrap=True)
    for label, summary, baseline in rows:
        made.add_row(label, *cells(summary, baseline))
    return made


def cells(summary: Summary, baseline: Summary | None) -> list[str]:
    failed = f" ({summary.errors} failed)" if summary.errors else ""
    return [
        f"{summary.requests}{failed}",
        f"{summary.prompt_tokens:,}",
        "not told" if summary.cached_tokens is None else f"{summary.cached_tokens:,}",
        "-" if summary.hit_rate is None else f"{summary.hit_rate:.1%}",
        duration(summary.ttft_p50_cold),
        duration(summary.ttft_p50_hot),
        duration(summary.inter_token_p50),
        f"{summary.output_tokens_per_second:.0f}",
        duration(summary.wall),
        "" if baseline is None or not summary.wall else f"{baseline.wall / summary.wall:.1f}x",
    ]


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def show(made: Table) -> None:
    """Print a table on stdout, in full width where that is no terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(made)
