"""A simulation as one self-contained page: the policies side by side, and how first-token times spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from caudex.report.numbers import percent
from caudex.report.svg import Mark, Point, Series, line_plot
from caudex.simulate import FleetChange, SimulationResult, Slo

_NUM_POINTS = 120
_NUM_WINDOWS = 60


def simulation_page(
    title: str, results: Sequence[SimulationResult], slo: Slo, deaths: Sequence[FleetChange], window: float
) -> str:
    """A whole HTML document. It loads nothing: styles and plots are inside, and there is no script. Of each death it
    tells what users saw in so many seconds before and after."""
    style = files("caudex.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = [_table(results, slo), _deaths(results, slo, deaths, window), _ttft(results, slo)]
    sections.append(_hit_rate(results, deaths))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>Simulation: {escape(title)}</title><style>{style}</style></head>"
        f"<body><main><p class=source>{escape(title)}</p><h1>{_headline(results)}</h1>{''.join(sections)}"
        "</main></body></html>\n"
    )


def _headline(results: Sequence[SimulationResult]) -> str:
    finite = [result for result in results if not np.isnan(result.ttft).all()]
    if not finite:
        return "No request was finished"
    best = min(finite, key=lambda result: float(np.nanmean(result.ttft)))
    return f"{escape(best.policy)}: first token after {np.nanmean(best.ttft):,.2f} s in the mean, the least"


def _table(results: Sequence[SimulationResult], slo: Slo) -> str:
    times = ("TTFT p50, s", "p90", "p99", "TPOT p50, ms", "p99")
    head = ("hit rate", "busiest / mean", *times, "in SLO", "good req/s", "retried", "refused")
    rows = []
    for result in results:
        row = result.summary(slo)
        cells = [
            _text(row["hit_rate"], percent),
            _text(row["imbalance"], "{:.2f}".format),
            *(_text(row["ttft"][name], "{:,.2f}".format) for name in ("p50", "p90", "p99")),
            *(_text(row["tpot"][name], lambda seconds: f"{seconds * 1e3:,.1f}") for name in ("p50", "p99")),
            _text(row["slo_share"], percent),
            _text(row["goodput_requests_per_second"], "{:,.2f}".format),
            f"{row['retried']:,}",
            f"{row['refused']:,}",
        ]
        numbers = "".join(f"<td class=n>{cell}</td>" for cell in cells)
        rows.append(f"<tr><td>{escape(result.policy)}</td>{numbers}</tr>")
    heads = "".join(f"<th class=n>{name}</th>" for name in head)
    note = f"SLO: first token within {slo.ttft:g} s, {slo.tpot * 1e3:g} ms between tokens."
    return (
        f'<section><div class="scroll"><table><thead><tr><th>policy</th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div><p>{note}</p></section>"
    )


def _deaths(results: Sequence[SimulationResult], slo: Slo, deaths: Sequence[FleetChange], window: float) -> str:
    rows = []
    for result in results:
        for death in deaths:
            around = result.around(death.time, window, slo)
            for when, row in around.items():
                cells = [
                    f"{row['requests']:,}",
                    _text(row["hit_rate"], percent),
                    *(_text(row["ttft"][name], "{:,.2f}".format) for name in ("mean", "p50", "p90", "p99")),
                    _text(row["slo_share"], percent),
                    f"{row['recomputed_tokens']:,}",
                    f"{row['retried']:,}",
                ]
                numbers = "".join(f"<td class=n>{cell}</td>" for cell in cells)
                name = f"{escape(result.policy)}, {when} replica {death.replica} died at {death.time:g} s"
                rows.append(f"<tr><td>{name}</td>{numbers}</tr>")
    if not rows:
        return ""
    times = ("TTFT mean, s", "p50", "p90", "p99")
    head = ("requests", "hit rate", *times, "in SLO", "recomputed tokens", "retried")
    heads = "".join(f"<th class=n>{name}</th>" for name in head)
    return (
        f"<section><h2>{window:g} s before and after a death</h2>"
        f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _ttft(results: Sequence[SimulationResult], slo: Slo) -> str:
    lines = [Series(r.policy, _distribution(r.ttft), f"s{i % 8}") for i, r in enumerate(results)]
    plot = line_plot(
        lines,
        x_label="seconds to the first token",
        y_label="share of requests",
        x_text=lambda x: f"{x:.3g}",
        log_x=True,
        marks=[Mark(slo.ttft, "SLO")],
        title="Share of requests by time to first token",
    )
    return f"<section><h2>Time to first token</h2>{plot}</section>"


def _hit_rate(results: Sequence[SimulationResult], deaths: Sequence[FleetChange]) -> str:
    lines = [Series(r.policy, _hit_rate_over_time(r), f"s{i % 8}") for i, r in enumerate(results)]
    plot = line_plot(
        lines,
        x_label="seconds from the first arrival",
        y_label="hit rate",
        x_text=lambda x: f"{x:,.0f}",
        marks=[Mark(death.time, f"{death.replica} dies") for death in deaths],
        title="Token hit rate over time",
    )
    return f"<section><h2>Hit rate over time</h2>{plot}</section>"


def _distribution(values: NDArray[np.float64]) -> list[Point]:
    """Points of the cumulative distribution."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return []
    at = np.unique(np.linspace(0, len(known) - 1, _NUM_POINTS).astype(int))
    return [(max(float(known[i]), 1e-6), (i + 1) / len(values)) for i in at.tolist()]


def _hit_rate_over_time(result: SimulationResult) -> list[Point]:
    """Of the requests that arrived in each of some windows, at the window's beginning."""
    if not len(result.arrivals):
        return []
    edges = np.linspace(0.0, float(result.arrivals[-1]) or 1.0, _NUM_WINDOWS + 1)
    window = np.clip(np.searchsorted(edges, result.arrivals, side="right") - 1, 0, _NUM_WINDOWS - 1)
    served = ~np.isnan(result.first_tokens)
    cached = np.bincount(window[served], weights=result.cached_tokens[served], minlength=_NUM_WINDOWS)
    prompt = np.bincount(window[served], weights=result.input_lengths[served], minlength=_NUM_WINDOWS)
    return [(float(edges[i]), float(cached[i] / prompt[i])) for i in range(_NUM_WINDOWS) if prompt[i] > 0]
