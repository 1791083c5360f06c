"""`caudex demo`: the two scenes on this machine, with the cache off and on, in one table."""

from __future__ import annotations

import asyncio

import click

from caudex.bench.client import Record, ServerError
from caudex.bench.demo import demo_plan, play_without_and_with_cache
from caudex.bench.summary import Summary
from caudex.bench.tables import Row, show
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
            pairs = asyncio.run(play_without_and_with_cache(demo_plan(), ctx.args, on_start, on_record))
        except (ServerError, RuntimeError, OSError) as exc:
            raise click.ClickException(str(exc)) from exc
    show("The same prompts, without and with the prefix cache", "cache", rows(pairs))
    if any(summary.errors for pair in pairs for summary in pair):
        raise SystemExit(1)


def rows(pairs: list[tuple[Summary, Summary]]) -> list[Row]:
    return [row for off, on in pairs for row in (Row(off.scene, "off", off), Row(on.scene, "on", on, off))]
