"""What a side-by-side run found: each server's figures, and Caudex's against the fastest peer's, like with like."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from caudex.bench.summary import Summary
from caudex.bench.tables import duration
from contenders import Contender, Part
from servers import Caudex

FIGURE_HEADINGS = (
    "scene",
    "server",
    "repeats",
    "wall (least-most)",
    "TTFT p50",
    "cold",
    "hot",
    "between tokens",
    "hit rate",
    "tokens/s",
    "failed",
)

COMPARED = {
    "document": ("wall", "ttft_p50"),
    "conversation": ("wall", "ttft_p50"),
    "repeat": ("ttft_p50_cold", "ttft_p50_hot"),
    "decode": ("output_tokens_per_second",),
    "round-robin": ("wall",),
}
"""What a scene is judged by. Of all but tokens a second less is better."""

WORDS = {
    "wall": "wall",
    "ttft_p50": "TTFT p50",
    "ttft_p50_cold": "TTFT cold",
    "ttft_p50_hot": "TTFT hot",
    "output_tokens_per_second": "tokens/s",
}

STANDING_HEADINGS = ("scene", "figure", "Caudex", "fastest peer, same bits", "ratio", "fastest peer, any bits", "ratio")


@dataclass(frozen=True, slots=True)
class Standing:
    """One figure of one Caudex beside the best that a peer reached; `peer` is None where none was measured.

    `lead` says how many times better Caudex is; below 1 it is worse.
    """

    part: Part
    figure: str
    ours: Contender
    peer: Contender | None

    @property
    def lead(self) -> float | None:
        mine, theirs = figure_of(self.ours, self.part, self.figure), self.theirs
        if not mine or not theirs:
            return None
        return mine / theirs if more_is_better(self.figure) else theirs / mine

    @property
    def theirs(self) -> float | None:
        return None if self.peer is None else figure_of(self.peer, self.part, self.figure)


def standings(
    contenders: Sequence[Contender], parts: Sequence[Part], *, any_bits: bool
) -> dict[tuple[str, str, str], Standing]:
    """By part, figure and Caudex: against the best peer with weights of as many bits, or of any."""
    ours = [contender for contender in contenders if isinstance(contender.server, Caudex)]
    peers = [contender for contender in contenders if not isinstance(contender.server, Caudex)]
    return {
        (part.label, figure, one.name): Standing(
            part,
            figure,
            one,
            best([peer for peer in peers if any_bits or peer.server.bits == one.server.bits], part, figure),
        )
        for part in parts
        for figure in COMPARED[part.scene]
        for one in ours
        if figure_of(one, part, figure) is not None
    }


def best(contenders: Sequence[Contender], part: Part, figure: str) -> Contender | None:
    """The one with the best median of a figure."""
    measured = [(value, one) for one in contenders if (value := figure_of(one, part, figure)) is not None]
    choose = max if more_is_better(figure) else min
    return choose(measured, key=lambda pair: pair[0])[1] if measured else None


def more_is_better(figure: str) -> bool:
    return figure == "output_tokens_per_second"


def figure_of(contender: Contender, part: Part, figure: str) -> float | None:
    return median(contender.summaries(part.label), figure)


def median(summaries: Sequence[Summary], figure: str) -> float | None:
    values = [value for summary in summaries if (value := getattr(summary, figure)) is not None]
    return statistics.median(values) if values else None


def standing_rows(contenders: Sequence[Contender], parts: Sequence[Part]) -> list[list[str]]:
    like, plain = (standings(contenders, parts, any_bits=any_bits) for any_bits in (False, True))
    return [
        [
            like[key].part.label,
            WORDS[like[key].figure],
            described(like[key].ours, like[key].part, like[key].figure),
            *peer_cells(like[key]),
            *peer_cells(plain[key]),
        ]
        for key in like
        if plain[key].peer is not None
    ]


def peer_cells(standing: Standing) -> list[str]:
    if standing.peer is None:
        return ["none", ""]
    lead = "" if standing.lead is None else f"{standing.lead:.2f}x"
    return [described(standing.peer, standing.part, standing.figure), lead]


def described(contender: Contender, part: Part, figure: str) -> str:
    """A figure with its server and weights, so that it is never read as another's."""
    value = figure_of(contender, part, figure)
    shown = f"{value:.0f}" if value is not None and more_is_better(figure) else duration(value)
    return f"{shown} ({contender.name}{', bf16' if contender.server.weights == 'bf16' else ''})"


def figure_rows(contenders: Sequence[Contender], parts: Sequence[Part]) -> list[list[str]]:
    return [
        figure_row(part.label, contender)
        for part in parts
        for contender in contenders
        if contender.played.get(part.label)
    ]


def figure_row(label: str, contender: Contender) -> list[str]:
    """A part's figures of one server: medians over its repeats."""
    summaries = contender.summaries(label)
    if not summaries:
        return [label, contender.name, "no answer", *[""] * (len(FIGURE_HEADINGS) - 3)]
    hit_rate = median(summaries, "hit_rate")
    walls = [summary.wall for summary in summaries]
    return [
        label,
        contender.name,
        str(len(summaries)),
        f"{duration(statistics.median(walls))} ({min(walls):.1f}-{max(walls):.1f})",
        *(duration(median(summaries, f"ttft_p50{kind}")) for kind in ("", "_cold", "_hot")),
        duration(median(summaries, "inter_token_p50")),
        "not told" if hit_rate is None else f"{hit_rate:.1%}",
        f"{median(summaries, 'output_tokens_per_second') or 0:.0f}",
        str(sum(summary.errors for summary in summaries) or ""),
    ]


def costs(contender: Contender) -> str:
    memory, startup = contender.peak_memory, contender.startup
    peak = "unknown" if memory is None else f"{memory / 2**20:,.0f} MiB"
    return f"{contender.name}: start-up {duration(startup)}, peak memory {peak}"


def show(contenders: Sequence[Contender], parts: Sequence[Part], *, markdown: bool = False) -> None:
    """Both tables, then what each server costs to start and to hold; `markdown` for a document."""
    if not any(contender.played for contender in contenders):
        print("nothing was measured")
        return
    print_rows = print_markdown if markdown else print_table
    print_rows(FIGURE_HEADINGS, figure_rows(contenders, parts), 2)
    if ahead := standing_rows(contenders, parts):
        print_rows(STANDING_HEADINGS, ahead, 3)
    for contender in contenders:
        if contender.played:
            print(f"{'- ' if markdown else ''}{costs(contender)}")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], num_words: int) -> None:
    """As wide as it needs to be, its first `num_words` columns words."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < num_words else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    console = Console()
    console.width = max(console.width, console.measure(table, options=console.options.update(width=400)).maximum)
    console.print(table)


def print_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], num_words: int) -> None:
    rule = [*["---"] * num_words, *["---:"] * (len(headings) - num_words)]
    for cells in (headings, rule, *rows):
        print(f"| {' | '.join(cells)} |")
    print()
