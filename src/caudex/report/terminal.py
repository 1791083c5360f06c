"""The analysis on one screen, read as an answer: what to do first, then why."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from caudex.analysis.results import Analysis, Breaker
from caudex.report.budget import token_budget
from caudex.report.numbers import bytes_text, count_text, duration_text, percent

SHOWN_BREAKERS = 4
SHOWN_CAPACITIES = 4
SHOWN_FILES = 3
SHOWN_VALUE_CHARS = 20
BAR_WIDTH = 60


def print_analysis(analysis: Analysis, console: Console) -> None:
    console.print(summary(analysis))


def summary(analysis: Analysis) -> RenderableType:
    parts: list[RenderableType] = [_source_line(analysis), _answer(analysis), _budget(analysis), _breakers(analysis)]
    parts += [_capacities(analysis), _facts(analysis), _flags(analysis), _notes(analysis)]
    return Group(*parts)


def _source_line(analysis: Analysis) -> Text:
    span = "" if not analysis.seconds else f" over {duration_text(analysis.seconds)}"
    source = "standard input" if analysis.read.source == "-" else Path(analysis.read.source).name
    return Text(
        f"{source}: {analysis.requests:,} requests{span}, {count_text(analysis.prompt_tokens)} prompt tokens", "dim"
    )


def _answer(analysis: Analysis) -> RenderableType:
    decision = analysis.decision
    text = Text(decision.headline, "bold green" if decision.enable else "bold")
    if decision.enable:
        memory = "" if decision.capacity_gib is None else f" ({decision.capacity_gib:,.1f} GiB of KV)"
        text.append(f"\nwith {decision.capacity_blocks:,} blocks of {analysis.block_size} tokens{memory}", "default")
        speed = decision.speed
        text.append(
            f"; prefill {_seconds(speed.prefill_seconds_without)} → {_seconds(speed.prefill_seconds_with)}",
            "default",
        )
    if analysis.breakers:
        best = analysis.breakers[0]
        text.append(f"\nFirst mend: {best.title.lower()} — {percent(analysis.infinite_hit_rate)} → ", "bold yellow")
        text.append(percent(best.hit_rate_if_mended), "bold yellow")
    return Panel(text, expand=False, border_style="green" if decision.enable else "dim", padding=(0, 1))


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def _budget(analysis: Analysis) -> Text:
    """The token budget as a bar: same session, other sessions, lost to rounding, new."""
    colours = {"in": "green", "cross": "cyan", "round": "yellow", "new": "bright_black"}
    shares = [(share, label, colours[style]) for share, label, style in token_budget(analysis)]
    bar = Text("  ")
    for share, _, style in shares:
        bar.append("█" * round(max(share, 0) * BAR_WIDTH), style)
    legend = Text("\n  ")
    for share, label, style in shares:
        legend.append("■ ", style).append(f"{label} {percent(share)} ")
    return bar + legend


def _breakers(analysis: Analysis) -> RenderableType:
    if not analysis.breakers:
        if analysis.breakers_searched.startswith("not"):
            return Text("Breakers were not looked for.", "dim")
        return Text(f"No breaker found (looked {analysis.breakers_searched}).", "green")
    rows: list[RenderableType] = [Text("What breaks prefixes, the costliest first", "bold")]
    rows.append(_breaker(analysis.breakers[0]))
    rows += [_breaker_line(number, breaker) for number, breaker in enumerate(analysis.breakers[1:SHOWN_BREAKERS], 2)]
    more = len(analysis.breakers) - SHOWN_BREAKERS
    if more > 0:
        rows.append(Text(f"  and {more} more (--html or --json)", "dim"))
    return Group(*rows)


def _breaker(breaker: Breaker) -> RenderableType:
    """The costliest, in full."""
    text = Text(f"1. {breaker.title}", "yellow")
    text.append(f" [{breaker.kind}]\n", "dim")
    shown = [repr(example.value[:SHOWN_VALUE_CHARS]) for example in breaker.examples[:2]]
    text.append(f"at {_place(breaker)}: ", "default").append(f"{' ↔ '.join(shown)}\n", "dim")
    text.append(
        f"costs {count_text(breaker.tokens_lost)} tokens in {breaker.requests:,} requests; hit rate if mended: ",
        "default",
    )
    text.append(percent(breaker.hit_rate_if_mended), "bold")
    text.append(f"\n{breaker.mend}.", "default")
    return Padding(text, (0, 0, 0, 2))


def _breaker_line(number: int, breaker: Breaker) -> RenderableType:
    text = Text(f"{number}. {breaker.title}", "yellow", no_wrap=True, overflow="ellipsis")
    text.append(f" [{breaker.kind}] → ", "dim").append(percent(breaker.hit_rate_if_mended), "bold")
    return Padding(text, (0, 0, 0, 2))


def _place(breaker: Breaker) -> str:
    token = "" if breaker.where.token is None else f", token {breaker.where.token:,}"
    return f"{breaker.where.description}{token}"


def _capacities(analysis: Analysis) -> RenderableType:
    """The curve at a few capacities, a column a policy, the bound last."""
    policies = list(dict.fromkeys(row.policy for row in analysis.curve))
    capacities = sorted({row.capacity_blocks for row in analysis.curve})
    step = max(1, -(-len(capacities) // SHOWN_CAPACITIES))
    shown = capacities[::-1][::step][::-1]
    rates = {(row.policy, row.capacity_blocks): row for row in analysis.curve}
    title = "Hit rate by capacity, %" + (", as the prompts are" if analysis.breakers else "")
    table = Table(box=None, padding=(0, 1), title=title, title_justify="left", title_style="bold")
    table.add_column("blocks", justify="right", no_wrap=True)
    if analysis.kv is not None:
        table.add_column("KV", justify="right", no_wrap=True)
    for policy in policies:
        table.add_column("bound" if policy == "clairvoyant" else policy, justify="right")
    for capacity in shown:
        row = rates[policies[0], capacity]
        memory = [] if row.capacity_gib is None else [bytes_text(row.capacity_gib * 2**30)]
        table.add_row(
            f"{capacity:,}", *memory, *(f"{100 * rates[policy, capacity].hit_rate:.1f}" for policy in policies)
        )
    return table


def _facts(analysis: Analysis) -> Text:
    mended = analysis.mended if analysis.breakers else None
    needed = {row.label: row for row in (analysis.capacities if mended is None else mended.capacities)}
    text = Text("Capacity  ", "bold")
    reached = ", ".join(f"{needed[label].capacity_blocks:,} {label}" for label in ("95%", "99%"))
    text.append(
        f"{'' if mended is None else 'with the prompts mended, '}{needed['90%'].capacity_blocks:,} blocks reach 90% of "
        f"the ceiling, {reached} · knee at {needed['knee'].capacity_blocks:,}",
        "default",
    )
    text.append("\nBlocks    ", "bold")
    text.append(" · ".join(f"{row.block_size}: {percent(row.hit_rate)}" for row in analysis.block_sizes), "default")
    repeated = analysis.repetition
    text.append("\nBesides   ", "bold")
    text.append(f"generated tokens cached too {percent(repeated.with_output_hit_rate)}", "default")
    text.append(f" · computed twice at once {percent(repeated.in_flight_rate)}", "default")
    tier = max(analysis.tiers, key=lambda row: row.gain)
    text.append(
        f" · a tier behind {tier.pool_blocks:,} blocks up to +{tier.gain * 100:.1f} points"
        if tier.gain > 0.005
        else "",
        "default",
    )
    if analysis.routing is not None:
        text.append("\nRouting   ", "bold")
        text.append(" · ".join(f"{row.routing} {percent(row.hit_rate)}" for row in analysis.routing), "default")
    return text


def _flags(analysis: Analysis) -> Text:
    text = Text("Flags     ", "bold")
    text.append(analysis.decision.flags["vllm"], "default")
    text.append("  (others: --html)", "dim")
    return text


def _notes(analysis: Analysis) -> Text:
    notes: list[str] = []
    if analysis.tokenizer:
        notes.append(f"tokens: {analysis.tokenizer}")
    if analysis.template:
        notes.append(f"template: {analysis.template}")
    notes.append(f"{analysis.decision.speed.assumption}")
    read = analysis.read
    notes += [f"{name} skipped: {reason}" for name, reason in read.bad_files[:SHOWN_FILES]]
    if (more := len(read.bad_files) - SHOWN_FILES) > 0:
        notes.append(f"and {more:,} more files skipped (--json lists them)")
    if bad := read.bad_lines - len(read.bad_files):
        shown = "; ".join(f"line {line}: {reason}" for line, reason in read.bad_examples)
        notes.append(f"{bad:,} bad line{'s' * (bad > 1)} skipped ({shown})")
    notes += [f"{count:,} {message}" for message, count in read.warnings.items()]
    return Text("\n".join(f"· {note}" for note in notes), "dim")
