"""Plays scenes against an endpoint, each as it is and with its prefixes spoilt, and summarises what was measured."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caudex.bench.client import Endpoint, Record, ServerError
from caudex.bench.corpus import Writer
from caudex.bench.player import Player, Scale
from caudex.bench.scenes import Scene
from caudex.bench.summary import Summary, summarize


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play. Each repeat has fresh text, drawn from `seed`; the same seed sends the same prompts again.

    `cold_runs` adds to each scene a run whose prompts share nothing, the measure of what caching brings.
    """

    scenes: Sequence[Scene]
    scale: Scale
    repeats: int = 1
    cold_runs: bool = True
    seed: int = 0

    @property
    def num_requests(self) -> int:
        once = sum(scene.count(self.scale) for scene in self.scenes)
        return once * self.repeats * (2 if self.cold_runs else 1)


async def play(endpoint: Endpoint, plan: Plan, on_record: Callable[[str, Record], None]) -> list[Summary]:
    """Play the plan; summaries in the order of the scenes, the cold run of each before the other.

    Raises:
        ServerError: the server does not answer the first, unmeasured request.
    """
    await warm_up(endpoint, plan)
    runs = [(scene, cold) for scene in plan.scenes for cold in ((True, False) if plan.cold_runs else (False,))]
    return [await play_scene(endpoint, plan, scene, cold, on_record) for scene, cold in runs]


async def play_scene(
    endpoint: Endpoint, plan: Plan, scene: Scene, cold: bool, on_record: Callable[[str, Record], None]
) -> Summary:
    records: list[Record] = []
    walls: list[float] = []
    for repeat in range(plan.repeats):
        writer = Writer(random.Random(f"{plan.seed}/{scene.name}/{repeat}/{cold}"))
        player = Player(endpoint, writer, plan.scale, cold, lambda record: on_record(scene.name, record))
        started = time.perf_counter()
        await scene.play(player)
        walls.append(time.perf_counter() - started)
        records += player.records
    return summarize(scene.name, cold, records, walls)


async def warm_up(endpoint: Endpoint, plan: Plan) -> None:
    """One request that is not measured: it pays for what a server does once, and finds out whether it answers."""
    player = Player(endpoint, Writer(random.Random(f"{plan.seed}/warm-up")), plan.scale)
    await player.complete(player.writer.document(200), 8, first=True)
    error = player.records[0].error
    if error is not None:
        raise ServerError(f"{endpoint.url} does not answer: {error}")
