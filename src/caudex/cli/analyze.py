"""`caudex analyze`: from a request log to a decision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


@click.command("analyze")
@click.argument("log", type=click.Path(exists=False, allow_dash=True))
@click.option("--tokenizer", metavar="T", help="Hugging Face folder or id, tiktoken name, or `bytes` (default).")
@click.option(
    "--chat-template", type=click.Path(exists=True, dir_okay=False), help="Jinja file to render messages with."
)
@click.option("--field", metavar="PATH", help="Dotted path to the request in each line, e.g. `request.body`.")
@click.option("--block-size", type=int, metavar="N", help="Tokens a block (16, or the hash trace's own).")
@click.option("--capacities", metavar="LIST", help="Blocks, or bytes of --model's KV: `1000,10000` or `20GiB,80GiB`.")
@click.option("--policies", metavar="LIST", help="Eviction policies to compare, e.g. `lru,fifo,lfu`.")
@click.option("--model", metavar="M", help="Well-known model, config.json or folder: turns blocks into GiB.")
@click.option("--kv-dtype", default="bf16", show_default=True, help="Type that KV is kept in (bf16, fp8, ...).")
@click.option("--gpu", metavar="G", help="Well-known GPU (H100, A100-80GB, L4, ...): memory and speed.")
@click.option("--replicas", type=int, default=1, show_default=True, help="Replicas, for the routing what-if.")
@click.option("--prefill-rate", type=float, metavar="TOK/S", help="Measured prefill speed, instead of arithmetic.")
@click.option("--limit", type=int, metavar="N", help="Read the first N requests only.")
@click.option("--no-breakers", is_flag=True, help="Skip the search for what breaks prefixes.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the report as JSON (`-`: standard output)."
)
@click.option("--html", "html_file", type=click.Path(dir_okay=False), help="Write the report as one page.")
def command(
    log: str, json_file: str | None, html_file: str | None, capacities: str | None, policies: str | None,
    no_breakers: bool, **options: Any,
) -> None:  # fmt: skip
    """Say how much a request log repeats, what breaks its prefixes, and which cache it is worth.

    LOG is JSON lines (raw requests in any gateway's wrapping, or a hash trace), a server's log, a Caudex trace in
    Parquet, a folder of these, or - for standard input; gz and zst are read directly.
    """
    from caudex.analysis.analyze import analyze
    from caudex.cli.reading import reading_progress, user_errors
    from caudex.report.terminal import print_analysis

    with user_errors(), reading_progress("analyzing") as (progress, stage):
        analysis = analyze(
            log,
            capacities=_split(capacities),
            policies=_split(policies),
            breakers=not no_breakers,
            progress=progress,
            stage=stage,
            **options,
        )
    with user_errors():
        if html_file:
            from caudex.report.html import html_page

            Path(html_file).write_text(html_page(analysis), encoding="utf-8")
        if json_file:
            text = json.dumps(analysis.to_dict(), ensure_ascii=False, indent=1)
            if json_file == "-":
                click.echo(text)
                return
            Path(json_file).write_text(text + "\n", encoding="utf-8")
    from rich.console import Console

    print_analysis(analysis, Console(highlight=False))


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]
