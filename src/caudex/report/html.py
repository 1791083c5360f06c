"""The analysis as one self-contained page: readable offline, light and dark, on a laptop and on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from caudex.analysis.breakers.candidate import Example
from caudex.analysis.results import Analysis, Breaker, RecoveredTemplate, SharedPrefix
from caudex.report.budget import token_budget
from caudex.report.numbers import bytes_text, count_text, duration_text, percent
from caudex.report.svg import Mark, Series, area_plot, line_plot

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM", "llama.cpp": "llama.cpp"}
SHOWN_VALUE_CHARS = 240


def html_page(analysis: Analysis) -> str:
    """A whole HTML document. It loads nothing: styles and plots are inside, and there is no script."""
    source = "standard input" if analysis.read.source == "-" else Path(analysis.read.source).name
    sections = [
        _answer(analysis, source),
        _budget(analysis),
        _breakers(analysis),
        _curves(analysis),
        _time(analysis),
        _prefixes(analysis),
        _templates(analysis),
        _sizes(analysis),
        _groups(analysis),
        _flags(analysis),
        _notes(analysis),
    ]
    style = files("caudex.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>Prefix caching: {escape(source)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _answer(analysis: Analysis, source: str) -> str:
    span = "" if not analysis.seconds else f" over {duration_text(analysis.seconds)}"
    tokenizer = f" · {analysis.tokenizer}" if analysis.tokenizer else ""
    decision = analysis.decision
    mend = ""
    if analysis.breakers:
        best = analysis.breakers[0]
        rates = f"{percent(analysis.infinite_hit_rate)} → {percent(best.hit_rate_if_mended)}"
        mend = f"<p>First mend: {escape(best.title.lower())}, <span class=gain>{rates}</span>. {escape(best.mend)}.</p>"
    memory = "" if decision.capacity_gib is None else f", {decision.capacity_gib:,.1f} GiB of KV"
    speed = decision.speed
    size = (
        f"<p>{decision.capacity_blocks:,} blocks of {analysis.block_size} tokens{memory}. Mean prefill of a request: "
        f"{_seconds(speed.prefill_seconds_without)} → {_seconds(speed.prefill_seconds_with)}.</p>"
        if decision.enable
        else ""
    )
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in decision.reasons)
    return (
        f"<p class=source>{escape(source)} · {analysis.requests:,} requests{span} · "
        f"{count_text(analysis.prompt_tokens)} prompt tokens{escape(tokenizer)}</p>"
        f"<h1>{escape(decision.headline)}</h1>"
        f'<div class="card answer{" mend" if analysis.breakers else ""}">{size}{mend}'
        f"<details><summary>Why</summary><ul>{reasons}</ul></details></div>"
    )


def _seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.1f} s"


def _budget(analysis: Analysis) -> str:
    repeated = analysis.repetition
    shares = token_budget(analysis)
    bar = "".join(
        f'<i class="{style}" style="width:{100 * max(share, 0):.2f}%" title="{label} {percent(share)}"></i>'
        for share, label, style in shares[:-1]
    )
    legend = "".join(
        f'<span class=item><span class="key {style}"></span>{label} {percent(share)}</span>'
        for share, label, style in shares
    )
    numbers = [
        (percent(repeated.hit_rate), "an infinite cache would serve"),
        (percent(repeated.token_hit_rate), "to the token, with partial hits"),
        (percent(repeated.with_output_hit_rate), "with generated tokens cached"),
        (percent(repeated.in_flight_rate), "computed twice at the same time"),
        (count_text(repeated.distinct_tokens), "distinct prompt tokens"),
    ]
    cells = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in numbers)
    bars = f"<div class=bar>{bar}</div><p class=legend>{legend}</p>"
    return f"<h2>Where prompt tokens come from</h2>{bars}<div class=numbers>{cells}</div>"


def _breakers(analysis: Analysis) -> str:
    title = "<h2>What breaks prefixes</h2>"
    if not analysis.breakers:
        if analysis.breakers_searched.startswith("not"):
            return f"{title}<p class=none>Not looked for.</p>"
        return f"{title}<p>None found (looked {escape(analysis.breakers_searched)}).</p>"
    return title + "".join(_breaker(number, breaker, analysis) for number, breaker in enumerate(analysis.breakers, 1))


def _breaker(number: int, breaker: Breaker, analysis: Analysis) -> str:
    token = "" if breaker.where.token is None else f", token {breaker.where.token:,} of the prompt"
    together = ""
    if breaker.hit_rate_if_all_mended - breaker.hit_rate_if_mended > 0.005:
        together = f" ({percent(breaker.hit_rate_if_all_mended)} with those above mended too)"
    rule = "" if breaker.rule is None else f"<pre>{escape(_rule_text(breaker.rule))}</pre>"
    return (
        f'<div class="card breaker"><h3>{number}. {escape(breaker.title)}</h3>'
        f"<p><span class=kind>{escape(breaker.kind)}</span> · {escape(breaker.where.description)}{token}</p>"
        f"<div class=diff>{''.join(_example(example) for example in breaker.examples)}</div>"
        f"<p>Costs {count_text(breaker.tokens_lost)} tokens in {breaker.requests:,} requests. Hit rate if mended: "
        f"<span class=gain>{percent(analysis.infinite_hit_rate)} → {percent(breaker.hit_rate_if_mended)}</span>"
        f"{together}</p>"
        f"<p>{escape(breaker.mend)}.</p>{rule}</div>"
    )


def _rule_text(rule: dict[str, object]) -> str:
    return ", ".join(f"{key}: {value!r}" for key, value in rule.items())


def _example(example: Example) -> str:
    value = example.value if len(example.value) <= SHOWN_VALUE_CHARS else example.value[:SHOWN_VALUE_CHARS] + " …"
    return (
        f"<div><small>line {example.line}</small><div class=text>{escape(example.before)}"
        f"<mark>{escape(value) or '∅'}</mark>{escape(example.after)}</div></div>"
    )


def _curves(analysis: Analysis) -> str:
    policies = list(dict.fromkeys(row.policy for row in analysis.curve))
    series = [Series("LRU, exact", analysis.lru_knots, "s0")]
    for index, policy in enumerate(name for name in policies if name not in {"lru", "clairvoyant"}):
        points = [(row.capacity_blocks, row.hit_rate) for row in analysis.curve if row.policy == policy]
        series.append(Series(policy, points, f"s{1 + index % 7}", dots=True))
    bound = [(row.capacity_blocks, row.hit_rate) for row in analysis.curve if row.policy == "clairvoyant"]
    series.append(Series("clairvoyant bound", bound, "bound", dots=True))
    if analysis.mended is not None:
        series.append(Series("LRU with the prompts mended", analysis.mended.lru_knots, "mended"))
    marks = [Mark(row.capacity_blocks, row.label) for row in analysis.capacities if row.label in {"knee", "99%"}]
    plot = line_plot(
        series, x_label=f"capacity (blocks of {analysis.block_size} tokens)", y_label="hit rate", x_text=_blocks_text,
        log_x=True, marks=marks, title="Hit rate against capacity",
    )  # fmt: skip
    rows = [
        [row.label, f"{row.capacity_blocks:,}", _gib(row.capacity_gib), percent(row.hit_rate)]
        for row in analysis.capacities
    ]
    table = _table(["of the ceiling", "blocks", "KV", "hit rate"], rows, numeric={1, 2, 3})
    tables = table + _policy_table(analysis, policies)
    return f"<h2>Hit rate at every capacity</h2><figure class=card>{plot}</figure>{tables}"


def _policy_table(analysis: Analysis, policies: Sequence[str]) -> str:
    rates = {(row.policy, row.capacity_blocks): row.hit_rate for row in analysis.curve}
    capacities = sorted({row.capacity_blocks for row in analysis.curve})
    rows = [[f"{capacity:,}", *(percent(rates[policy, capacity]) for policy in policies)] for capacity in capacities]
    table = _table(["blocks", *policies], rows, numeric=set(range(len(policies) + 1)))
    return f"<details><summary>All capacities and policies</summary>{table}</details>"


def _blocks_text(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:,.4g}{unit}"
    return f"{value:,.0f}"


def _gib(value: float | None) -> str:
    return "" if value is None else bytes_text(value * 2**30)


def _time(analysis: Analysis) -> str:
    if not analysis.reuse_over_time:
        return ""
    timed = analysis.seconds is not None
    plot = area_plot(
        analysis.reuse_over_time,
        x_text=_clock_text if timed else _blocks_text,
        x_label="time since the first request" if timed else "requests",
        title="Reuse over time",
    )
    return f"<h2>Reuse over time</h2><figure class=card>{plot}</figure>"


def _clock_text(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}" + ("" if hours else f":{rest % 60:02d}")


def _prefixes(analysis: Analysis) -> str:
    if not analysis.prefixes:
        return ""
    most = max(node.tokens_saved for node in analysis.prefixes) or 1
    tree = "".join(_prefix(node, most, is_open=index == 0) for index, node in enumerate(analysis.prefixes))
    return (
        "<h2>The heaviest shared prefixes</h2>"
        "<p class=note>Each level opens into the continuations that requests share. "
        f"The bar is what sharing saves.</p><div class=card>{tree}</div>"
    )


def _prefix(node: SharedPrefix, most: int, *, is_open: bool = False) -> str:
    bar = f'<span class=weight style="width:{max(3, round(90 * node.tokens_saved / most))}px"></span>'
    label = (
        f"{node.requests:,} requests share tokens {node.start_token:,} to {node.end_token:,} · "
        f"{count_text(node.tokens_saved)} saved"
    )
    children = "".join(_prefix(child, most) for child in node.children)
    return (
        f"<details{' open' if is_open else ''}><summary>{bar}{label}</summary>"
        f"<div class=text>{escape(node.text)}</div>{children}</details>"
    )


def _templates(analysis: Analysis) -> str:
    if not analysis.templates:
        return ""
    return "<h2>Templates behind the prompts</h2>" + "".join(_template(template) for template in analysis.templates)


def _template(template: RecoveredTemplate) -> str:
    parts = [escape(template.fixed_parts[0])]
    for slot, literal in zip(template.slots, template.fixed_parts[1:], strict=True):
        examples = " | ".join(" ".join(value.split())[:40] for value in slot.examples)
        parts.append(
            f'<mark title="{escape(examples, quote=True)}">{slot.distinct_values} values: {escape(examples)}</mark>'
        )
        parts.append(escape(literal))
    return (
        f"<details class=card><summary>{escape(template.where)}: "
        f"{template.variants:,} variants in {template.requests:,} uses, "
        f"{len(template.slots)} slots; reordered {percent(template.hit_rate_if_reordered)}</summary>"
        f"<div class=text>{''.join(parts)}</div>"
        f"<p class=note>Better order: {escape(template.suggested_order)}.</p></details>"
    )


def _sizes(analysis: Analysis) -> str:
    sizes = [
        [f"{row.block_size}", percent(row.hit_rate), percent(row.lost_to_rounding)] for row in analysis.block_sizes
    ]
    tiers = [
        [
            row.tier,
            "" if row.tier_blocks is None else f"{row.tier_blocks:,}",
            _gib(row.tier_gib),
            percent(row.hit_rate),
            f"+{100 * row.gain:.1f}",
        ]
        for row in analysis.tiers
    ]
    pool = f"{analysis.tiers[0].pool_blocks:,}" if len(analysis.tiers) else ""
    parts = [
        "<h2>Block size, tiers and replicas</h2><h3>Block size</h3>",
        _table(["tokens a block", "hit rate", "lost to rounding"], sizes, numeric={0, 1, 2}),
        f"<h3 style='margin-top:18px'>A second tier behind a pool of {pool} blocks</h3>",
        _table(["tier", "blocks", "memory", "hit rate", "points"], tiers, numeric={1, 2, 3, 4}),
    ]
    if analysis.routing is not None:
        rows = [[row.routing, percent(row.hit_rate), f"{row.imbalance:.2f}"] for row in analysis.routing]
        replicas = analysis.routing[0].replicas
        parts.append(f"<h3 style='margin-top:18px'>{replicas} replicas</h3>")
        parts.append(_table(["routing", "hit rate", "busiest over mean"], rows, numeric={1, 2}))
    return "".join(parts)


def _groups(analysis: Analysis) -> str:
    parts = []
    for by in dict.fromkeys(row.by for row in analysis.groups):
        found = [row for row in analysis.groups if row.by == by]
        if len(found) < 2:
            continue
        rows = [
            [row.name or "(none)", f"{row.requests:,}", count_text(row.prompt_tokens), percent(row.hit_rate)]
            for row in found
        ]
        table = _table([by, "requests", "prompt tokens", "hit rate"], rows, numeric={1, 2, 3})
        parts.append(
            f"<details><summary>By {by} ({len(found)}{', the largest' if by == 'session' else ''})</summary>"
            f"{table}</details>"
        )
    return f"<h2>Who repeats</h2>{''.join(parts)}" if parts else ""


def _flags(analysis: Analysis) -> str:
    flags = "".join(
        f"<h3>{ENGINES.get(name, name)}</h3><pre>{escape(line)}</pre>" for name, line in analysis.decision.flags.items()
    )
    return f"<h2>Settings</h2>{flags}"


def _notes(analysis: Analysis) -> str:
    notes = [f"Speed: {analysis.decision.speed.assumption}."]
    if analysis.template:
        notes.append(f"Messages were rendered with: {analysis.template}.")
    if analysis.kv is not None:
        size = bytes_text(analysis.kv.bytes_per_cached_token)
        notes.append(f"KV: {size} a token ({analysis.kv.model}, {analysis.kv.attention}, {analysis.kv.dtype}).")
    read = analysis.read
    notes.append(
        f"Read {read.lines:,} lines ({read.format}), {read.bad_lines:,} bad, {read.other_lines:,} about something else."
    )
    notes += [f"Line {line}: {reason}." for line, reason in read.bad_examples]
    notes += [f"{name} skipped: {reason}." for name, reason in read.bad_files]
    notes += [f"{count:,} {message}." for message, count in read.warnings.items()]
    notes.append(
        "Requests are replayed one after another, each finished before the next; the last token is always computed."
    )
    return f"<h2>Assumptions and notes</h2><ul class=note>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numeric: set[int]) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        return f"<{tag}{' class=n' if index in numeric else ''}>{escape(text)}</{tag}>"

    head = "".join(cell("th", index, text) for index, text in enumerate(header))
    body = "".join(f"<tr>{''.join(cell('td', index, text) for index, text in enumerate(row))}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
