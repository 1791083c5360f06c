"""Small plots as inline SVG: no script, no font, no request. Colours come from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 720, 312
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 14, 54
_COLUMN_KEYS = (("hit", "served"), ("new", "computed"))


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot. `style` is a CSS class of the page (`s0` .. `s7`, `bound`, `mended`)."""

    name: str
    points: Sequence[Point]
    style: str
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at `x` with a word beside it."""

    x: float
    label: str


def line_plot(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
    log_x: bool = False,
    marks: Sequence[Mark] = (),
    title: str = "",
) -> str:
    """Lines over a shared x; y runs from 0 to 1 and is shown in percent."""
    xs = [x for line in series for x, _ in line.points if x > 0 or not log_x]
    if not xs:
        return "<p class=none>Nothing to plot.</p>"
    scale = _scale(min(xs), max(xs), log_x)
    parts = [_open(title), _y_axis(y_label), _x_axis(_ticks(min(xs), max(xs), log_x), scale, x_label, x_text)]
    shown = [mark for mark in marks if min(xs) <= mark.x <= max(xs)]
    parts += [_mark(mark, scale, row) for row, mark in enumerate(shown)]
    parts += [_line(line, scale, x_text, log_x) for line in series]
    parts.append("</svg>")
    return "".join(parts) + _legend(series)


def area_plot(
    points: Sequence[tuple[float, float, float]], *, x_text: Callable[[float], str], x_label: str, title: str
) -> str:
    """Columns over time: height is a window's tokens against the busiest one's; the filled part was served."""
    most = max((tokens for _, tokens, _ in points), default=0.0)
    if not most:
        return "<p class=none>Nothing to plot.</p>"
    width = (WIDTH - LEFT - RIGHT) / len(points)
    parts = [_open(title), _y_axis("share of the busiest window")]
    for index, (start, tokens, served) in enumerate(points):
        x, height = LEFT + index * width, (HEIGHT - TOP - BOTTOM) * tokens / most
        tip = f"<title>{escape(x_text(start))}: {tokens:,.0f} prompt tokens, {served:.1%} served</title>"
        columns = _column("new", x, 0.86 * width, height) + _column("hit", x, 0.86 * width, height * served)
        parts.append(f"<g>{tip}{columns}</g>")
    last = points[-1][0] + (points[1][0] - points[0][0] if len(points) > 1 else 1)
    parts.append(_x_axis(_ticks(0, last, False), _scale(0, last, False), x_label, x_text))
    keys = "".join(f'<span class=item><span class="key {key}"></span>{word}</span>' for key, word in _COLUMN_KEYS)
    return "".join(parts) + f"</svg><p class=legend>{keys}</p>"


def _open(title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'


def _text(style: str, x: float, y: float, anchor: str, text: str, transform: str = "") -> str:
    turned = f' transform="{transform}"' if transform else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(text)}</text>'


def _column(style: str, x: float, width: float, height: float) -> str:
    """A rectangle that stands on the x axis."""
    y = HEIGHT - BOTTOM - height
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _scale(low: float, high: float, log: bool) -> Callable[[float], float]:
    a, b = (math.log10(low), math.log10(high)) if log else (low, high)
    span = (b - a) or 1.0

    def place(x: float) -> float:
        value = math.log10(max(x, low)) if log else x
        return LEFT + (value - a) / span * (WIDTH - LEFT - RIGHT)

    return place


def _y(share: float) -> float:
    return TOP + (1 - min(max(share, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM)


def _y_axis(label: str) -> str:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(share):.1f}" y2="{_y(share):.1f}"/>')
        parts.append(_text("tick", LEFT - 6, _y(share) + 4, "end", f"{share:.0%}"))
    middle = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(_text("axis y", 0, 0, "middle", label, f"translate(12 {middle}) rotate(-90)"))
    return "".join(parts)


def _x_axis(ticks: Sequence[float], place: Callable[[float], float], label: str, text: Callable[[float], str]) -> str:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in ticks:
        x = place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(_text("tick", x, bottom + 23, "middle", text(tick)))
    parts.append(_text("axis", (WIDTH + LEFT - RIGHT) / 2, HEIGHT - 6, "middle", label))
    return "".join(parts)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        ticks = [10.0**power for power in range(first, last + 1)]
        return ticks if len(ticks) >= 2 else sorted({low, high})
    step = _round_step((high - low) / 6 or 1.0)
    count = int((high - low) / step + 1e-9)
    return [low + step * number for number in range(count + 1)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= step - 1e-12)


def _mark(mark: Mark, place: Callable[[float], float], row: int) -> str:
    """Each label stands on a row of its own, so that near marks do not overprint."""
    x = place(mark.x)
    anchor, shift = ("end", -5) if x > WIDTH * 0.8 else ("start", 5)
    line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return line + _text("tick", x + shift, HEIGHT - BOTTOM - 8 - 19 * row, anchor, mark.label)


def _line(line: Series, place: Callable[[float], float], x_text: Callable[[float], str], log: bool) -> str:
    points = [(place(x), _y(y), x, y) for x, y in line.points if x > 0 or not log]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in points)
    parts = [f'<polyline class="line {line.style}" points="{path}"><title>{escape(line.name)}</title></polyline>']
    if line.dots:
        parts += [
            f'<circle class="dot {line.style}" cx="{px:.1f}" cy="{py:.1f}" r="3.2">'
            f"<title>{escape(line.name)} at {escape(x_text(x))}: {y:.1%}</title></circle>"
            for px, py, x, y in points
        ]
    return "".join(parts)


def _legend(series: Sequence[Series]) -> str:
    keys = " ".join(
        f'<span class="item"><span class="key {line.style}"></span>{escape(line.name)}</span>' for line in series
    )
    return f"<p class=legend>{keys}</p>"
