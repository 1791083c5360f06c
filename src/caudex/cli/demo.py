"""`caudex demo`: the two scenes on this machine, with the cache off and on, in one table."""

from __future__ import annotations

import asyncio

import click

from caudex.bench.client import Record, ServerError
from caudex.bench.demo import demo_plan, play_demo
from caudex.bench.summary import Summary
from caudex.bench.tables import show, table
from caudex.cli.progress import CountBar


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show what the cache brings: two scenes on a server of its own, with the cache off and on.

    Options are passed on to `caudex serve`.
    """
    with CountBar(2 * demo_plan().num_requests) as bar:

        def on_start(caching: bool) -> None:
            bar.say(f"starting the server, cache {'on' if caching else 'off'}")

        def on_record(scene: str, record: Record) -> None:
            bar.advance(scene, record.error)

        try:
            pairs = asyncio.run(play_demo(ctx.args, on_start, on_record))
        except (ServerError, RuntimeError, OSError) as exc:
            raise click.ClickException(str(exc)) from exc
    show(table(rows(pairs), "The same prompts, without and with the prefix cache"))
    if any(summary.errors for pair in pairs for summary in pair):
        raise SystemExit(1)


def rows(pairs: list[tuple[Summary, Summary]]) -> list[tuple[str, Summary, Summary | None]]:
    labelled: list[tuple[str, Summary, Summary | None]] = []
    for off, on in pairs:
        labelled += [(f"{off.scene}, cache off", off, None), (f"{on.scene}, cache on", on, off)]
    return labelled
