"""Scenes on a server of our own, with the cache off and on: what prefix caching brings on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from caudex.bench.client import Endpoint, Record, first_model
from caudex.bench.local import caudex_command, free_port, running
from caudex.bench.player import Scale
from caudex.bench.run import Plan, play
from caudex.bench.scenes import SCENES
from caudex.bench.summary import Summary

DEMO_SCENES = ("conversation", "document")
SCALE = Scale(questions=16, sessions=6, system_tokens=500, concurrency=4)


def demo_plan() -> Plan:
    return Plan([SCENES[name] for name in DEMO_SCENES], SCALE, cold_runs=False)


async def play_without_and_with_cache(
    plan: Plan,
    options: Sequence[str],
    on_start: Callable[[bool], None],
    on_record: Callable[[str, Record], None],
) -> list[tuple[Summary, Summary]]:
    """Start `caudex serve` with `options`, cache off and then on, and play the same prompts to each.

    Returns:
        For each scene its summaries without and with the cache.

    Raises:
        RuntimeError: the server does not start.
        ServerError: it does not answer.
    """
    with_and_without = []
    for caching in (False, True):
        on_start(caching)
        switch = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
        port = free_port()
        with running(caudex_command([switch, *options], port), port) as server:
            endpoint = Endpoint(server.url, await first_model(Endpoint(server.url, "")))
            with_and_without.append(await play(endpoint, plan, on_record))
    return list(zip(*with_and_without, strict=True))
