"""`caudex trace`: convert, look at, anonymise and generate request logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_READING: tuple[_Decorator, ...] = (
    click.argument("log", type=click.Path(allow_dash=True)),
    click.option("--tokenizer", metavar="T", help="Hugging Face folder or id, tiktoken name, or `bytes` (default)."),
    click.option("--chat-template", type=click.Path(exists=True, dir_okay=False), help="Jinja file to render with."),
    click.option("--field", metavar="PATH", help="Dotted path to the request in each line."),
    click.option(
        "--block-size", type=click.IntRange(1), help="Tokens a hash id stands for, where the trace is silent."
    ),
    click.option("--limit", type=click.IntRange(1), help="Read the first N requests only."),
)


def _reads_a_log(function: Callable[..., None]) -> Callable[..., None]:
    for decorate in reversed(_READING):
        function = decorate(function)
    return function


@click.group("trace")
def command() -> None:
    """Convert, look at, anonymise and generate request logs."""


@contextmanager
def _opened(title: str, options: dict[str, Any]) -> Iterator[Any]:
    from caudex.cli.reading import reading_progress, user_errors
    from caudex.trace.log import open_log

    log = options.pop("log")
    with user_errors(), reading_progress(title) as (progress, _):
        opened = open_log(log, progress=progress, **options)
        yield opened
    _tell_problems(opened.report)


def _tell_problems(report: Any) -> None:
    for line, reason in report.bad_examples:
        click.echo(f"line {line} skipped: {reason}", err=True)
    for name, reason in report.bad_files:
        click.echo(f"{name} skipped: {reason}", err=True)
    if report.bad_lines:
        click.echo(f"{report.bad_lines} of {report.lines} lines skipped", err=True)
    for message, count in report.warnings.items():
        click.echo(f"{count} {message}", err=True)


@command.command()
@_reads_a_log
@click.argument("out", type=click.Path(dir_okay=False))
def convert(out: str, **options: Any) -> None:
    """Write LOG as a Caudex trace (Parquet): token ids, or the block ids of a hash trace."""
    from caudex.trace.table import write_parquet

    with _opened("converting", options) as opened:
        rows = write_parquet(out, opened.batches, opened.schema)
    click.echo(f"{rows:,} requests in {out} ({Path(out).stat().st_size / 2**20:,.1f} MiB)")


@command.command()
@_reads_a_log
@click.option("-n", "--rows", type=click.IntRange(1), default=5, show_default=True, help="Requests to show.")
def head(rows: int, **options: Any) -> None:
    """Show the first requests of LOG as Caudex reads them."""
    options["limit"] = rows
    with _opened("reading", options) as opened:
        shown = [row for batch in opened.batches for row in batch.to_pylist()]
    for row in shown:
        kind = "token_ids" if "token_ids" in row else "block_ids"
        ids = row.pop(kind)
        known = ", ".join(f"{key}={value}" for key, value in row.items() if value is not None)
        click.echo(f"{known}\n  {kind}: {', '.join(map(str, ids[:12]))}{', ...' if len(ids) > 12 else ''}")


@command.command()
@_reads_a_log
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(as_json: bool, **options: Any) -> None:
    """Count what LOG holds: requests, lengths, times, sessions."""
    from caudex.trace.stats import trace_stats

    with _opened("reading", options) as opened:
        found = asdict(trace_stats(opened.batches))
    if as_json:
        import json

        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        click.echo(f"{name.replace('_', ' '):16} {'-' if value is None else format(value, ',.10g')}")


@command.command()
@_reads_a_log
@click.argument("out", type=click.Path(dir_okay=False))
@click.option(
    "--key-file", type=click.Path(exists=True, dir_okay=False), help="Secret that makes ids equal across logs."
)
@click.option("--blocks-of", type=click.IntRange(1), default=16, show_default=True, help="Tokens a block that is kept.")
def anonymize(out: str, key_file: str | None, blocks_of: int, **options: Any) -> None:
    """Write LOG with keyed hashes in place of text, tokens and names: prefix structure, lengths and times stay.

    Without --key-file the key is random and forgotten, and ids of two logs cannot be compared.
    """
    from caudex.trace.anonymize import Anonymizer
    from caudex.trace.table import write_parquet

    with _opened("anonymizing", options) as opened:
        key = Path(key_file).read_bytes() if key_file else None
        anonymizer = Anonymizer(opened.info, blocks_of, key)
        rows = write_parquet(out, anonymizer.batches(opened.batches), anonymizer.schema)
    click.echo(f"{rows:,} requests in {out}")


@command.command()
@click.argument("workloads", nargs=-1, required=True, metavar="WORKLOAD[=SHARE]...")
@click.option("-n", "--requests", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--rate", type=float, default=1.0, show_default=True, help="Conversations a second (Poisson).")
@click.option("--zipf", type=float, default=1.1, show_default=True, help="How unequal the documents' popularity is.")
@click.option("--documents", type=click.IntRange(1), default=50, show_default=True)
@click.option("--tenants", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), help="File to write (.gz and .zst compress); else output."
)
def generate(workloads: tuple[str, ...], out: str | None, **settings: Any) -> None:
    """Write a seeded log of OpenAI request bodies.

    WORKLOAD is chat, rag, few-shot, self-consistency, tree-search, agent or one-shot; several make a mix:
    `caudex trace generate chat=3 agent=1 one-shot=1 -o mix.jsonl.zst`.
    """
    import msgspec

    from caudex.cli.reading import user_errors
    from caudex.trace.generate import WorkloadSettings
    from caudex.trace.generate import generate as bodies

    with user_errors(), _sink(out) as write:
        mix = {name: float(share or 1) for name, _, share in (text.partition("=") for text in workloads)}
        for body in bodies(mix, WorkloadSettings(**settings)):
            write(msgspec.json.encode(body) + b"\n")


@contextmanager
def _sink(out: str | None) -> Iterator[Callable[[bytes], object]]:
    """Where bytes go: a file, compressed as its name says, or standard output."""
    if out is None:
        yield sys.stdout.buffer.write
        return
    if out.endswith(".gz"):
        import gzip

        with gzip.open(out, "wb") as zipped:
            yield zipped.write
    elif out.endswith(".zst"):
        import zstandard

        with Path(out).open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as packed:
            yield packed.write
    else:
        with Path(out).open("wb") as plain:
            yield plain.write
