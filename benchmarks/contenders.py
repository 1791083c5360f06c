"""Servers that play the same scenes by turns: all are up, and only the one that plays has the processor."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caudex.bench.client import Endpoint, Record, ServerError, first_model
from caudex.bench.local import LocalServer, free_port, running
from caudex.bench.player import Scale
from caudex.bench.run import Plan, play
from caudex.bench.scenes import SCENES
from caudex.bench.summary import Summary
from servers import Server, Setting

SILENT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Part:
    """A scene at a scale, under a letter."""

    letter: str
    scene: str
    scale: Scale
    variant: str = ""

    @property
    def label(self) -> str:
        return f"{self.letter} {self.scene}{f', {self.variant}' if self.variant else ''}"


@dataclass(frozen=True, slots=True)
class Patience:
    """From `slow` seconds on a part is played once; after `limit` it counts as not answered.

    A turn is played again, at most `retries` times, when other processes took more than `elsewhere` of the machine's
    processor time meanwhile: a server whose threads wait for each other loses far more than that share.
    """

    slow: float = 20.0
    limit: float = 300.0
    elsewhere: float = 0.05
    retries: int = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """One turn: what was measured, None without an answer; what to say of it; and the share of the machine's processor
    time that went elsewhere meanwhile, None where that is not known or was not what it failed of."""

    summary: Summary | None
    said: str
    elsewhere: float | None


class NoAnswerError(Exception):
    """A server stopped answering; the message says how that was seen."""


@dataclass
class Contender:
    """A server and its figures: a Summary a repeat of each part, None where it did not answer.

    `startup` (seconds) and `peak_memory` (bytes, of its whole process tree) are those of the first setting it ended.
    """

    server: Server
    label: str = ""
    played: dict[str, list[Summary | None]] = field(default_factory=dict)
    elsewhere: dict[str, list[float | None]] = field(default_factory=dict)
    startup: float | None = None
    peak_memory: int | None = None
    _process: ExitStack = field(default_factory=ExitStack)
    _local: LocalServer | None = None

    @property
    def name(self) -> str:
        return self.label or self.server.name

    def start(self, setting: Setting) -> None:
        """Start the server unless it is up, and stop all of its processes until it plays.

        Raises:
            RuntimeError, OSError: it does not start; the message quotes what it printed.
        """
        if self._local is not None:
            return
        port = free_port()
        command = self.server.command(setting, port)
        self._local = self._process.enter_context(running(command, port, environment=self.server.environment))
        self.startup = self.startup or self._local.startup
        self._local.pause()

    def end(self) -> None:
        if self._local is not None and not self.peak_memory:
            self.peak_memory = self._local.peak_memory()
        self._process.close()
        self._local = None

    def is_done(self, part: Part, slow: float) -> bool:
        """Whether another repeat would only take time."""
        played = self.played.get(part.label, [])
        return bool(played) and (played[-1] is None or played[-1].wall > slow)

    def play(self, part: Part, setting: Setting, seed: int, limit: float) -> Outcome:
        """Play a part once. A server that does not answer is ended, and started again when it plays next."""
        try:
            self.start(setting)
            assert self._local is not None
            self._local.resume()
            meter = OthersMeter(self._local)
            summary = asyncio.run(play_watched(self._local, part, seed, limit))
        except NoAnswerError as error:
            elsewhere = meter.share()
            self.end()
            return Outcome(None, f"does not answer: {error}", elsewhere)
        except (ServerError, OSError, RuntimeError) as error:
            self.end()
            return Outcome(None, f"fails: {error}", None)
        self._local.pause()
        failed = f", {summary.errors} failed" if summary.errors else ""
        return Outcome(summary, f"{summary.wall:.1f} s{failed}", meter.share())

    def keep(self, part: Part, outcome: Outcome) -> None:
        self.played.setdefault(part.label, []).append(outcome.summary)
        self.elsewhere.setdefault(part.label, []).append(outcome.elsewhere)

    def summaries(self, label: str) -> list[Summary]:
        """Those of the repeats of a part that were answered."""
        return [summary for summary in self.played.get(label, []) if summary is not None]

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.name,
            "weights": self.server.weights,
            "bits": self.server.bits,
            "options": [*self.server.options],
            "environment": {**self.server.environment},
            "startup": self.startup,
            "peak_memory": self.peak_memory,
            "parts": {
                label: [summary and dataclasses.asdict(summary) for summary in summaries]
                for label, summaries in self.played.items()
            },
            "elsewhere": self.elsewhere,
        }

    def is_of(self, kept: dict[str, Any]) -> bool:
        """Whether `as_json` of an earlier run is of a server like this one."""
        now = self.as_json()
        return all(kept[name] == now[name] for name in ("weights", "options", "environment"))

    def add_json(self, kept: dict[str, Any]) -> None:
        """Take what `as_json` of an earlier run has as this one's first repeats."""
        for label, summaries in kept["parts"].items():
            earlier = [summary and Summary(**summary) for summary in summaries]
            self.played[label] = [*earlier, *self.played.get(label, [])]
            self.elsewhere[label] = [*kept["elsewhere"].get(label, []), *self.elsewhere.get(label, [])]
        self.startup, self.peak_memory = kept["startup"], kept["peak_memory"]


async def play_watched(local: LocalServer, part: Part, seed: int, limit: float) -> Summary:
    """Play a part, unless the server falls silent."""
    endpoint = Endpoint(local.url, await first_model(Endpoint(local.url, "")), timeout=limit)
    plan = Plan([SCENES[part.scene]], part.scale, cold_runs=False, seed=seed)
    playing = asyncio.create_task(play(endpoint, plan, report_error))
    watching = asyncio.create_task(wait_until_silent(local))
    try:
        await asyncio.wait({playing, watching}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            return playing.result()[0]
        if watching.done():
            raise NoAnswerError(f"it used no processor time for {SILENT_SECONDS:g} s with requests open")
        raise NoAnswerError(f"{part.label} was not done after {limit:g} s")
    finally:
        playing.cancel()
        watching.cancel()


async def wait_until_silent(local: LocalServer) -> None:
    """Until the server has used next to no processor time for `SILENT_SECONDS`; for ever where that is not known."""
    used, since = local.cpu_seconds(), time.monotonic()
    while time.monotonic() - since < SILENT_SECONDS:
        await asyncio.sleep(1.0)
        now = local.cpu_seconds()
        if now is None or used is None or now - used > 0.1:
            used, since = now, time.monotonic()


class OthersMeter:
    """The share of the machine's processor time that neither a server nor this process took, from now on."""

    def __init__(self, local: LocalServer) -> None:
        self._local = local
        self._began = self._read()

    def share(self) -> float | None:
        """None where the system does not tell."""
        before, now = self._began, self._read()
        if before is None or now is None or now[1] <= before[1]:
            return None
        return max(0.0, (now[0] - before[0]) / (now[1] - before[1]))

    def _read(self) -> tuple[float, float] | None:
        """Seconds that others took, and all there were, on every core together."""
        ours = self._local.cpu_seconds()
        if ours is None:
            return None
        ticks = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, idle, io_wait, *rest = (count / os.sysconf("SC_CLK_TCK") for count in ticks)
        busy = user + nice + system + sum(rest)
        return busy - ours - time.process_time(), busy + idle + io_wait


def report_error(scene: str, record: Record) -> None:
    if record.error is not None:
        print(f"failed in {scene}: {record.error}", file=sys.stderr)


class Match:
    """Contenders that play parts by turns; what is measured is in the contenders.

    `on_turn` is told what is happening now and how many seconds are probably left, None while nothing is known;
    `on_result` what came of it.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        parts: dict[Setting, tuple[Part, ...]],
        patience: Patience,
        on_turn: Callable[[str, float | None], None],
        on_result: Callable[[str], None],
    ) -> None:
        self.contenders = contenders
        self.parts = {setting: chosen for setting, chosen in parts.items() if chosen}
        self.patience = patience
        self.on_turn = on_turn
        self.on_result = on_result

    def play(self, repeats: int, seed: int) -> None:
        """Every part `repeats` times, each with its own text; all servers have ended afterwards, however it ends."""
        settings = list(self.parts)
        for number, setting in enumerate(settings):
            later = [part for other in settings[number + 1 :] for part in self.parts[other]]
            with ExitStack() as ending:
                for contender in self.contenders:
                    ending.callback(contender.end)
                started = [contender for contender in self.contenders if self._is_up(contender, setting)]
                order = list(turns(self.parts[setting], repeats, started))
                for place, (part, repeat, contender) in enumerate(order):
                    ahead = [(part, one) for part, _, one in (*order[place:], *turns(later, repeats, started))]
                    if not contender.is_done(part, self.patience.slow):
                        label = f"{part.label} {repeat + 1}/{repeats}: {contender.name}"
                        self.on_turn(f"{label} plays", seconds_left(ahead, self.patience.slow))
                        self._play_undisturbed(contender, part, setting, seed + repeat, label)

    def _play_undisturbed(self, contender: Contender, part: Part, setting: Setting, seed: int, label: str) -> None:
        """Fresh text every time, or the last try would be found in the cache."""
        for tries in range(self.patience.retries + 1):
            outcome = contender.play(part, setting, seed + 1_000 * tries, self.patience.limit)
            disturbed = outcome.elsewhere is not None and outcome.elsewhere > self.patience.elsewhere
            taken = f"; {outcome.elsewhere:.0%} of the processor went elsewhere" if disturbed else ""
            again = ", so it plays again" if disturbed and tries < self.patience.retries else ""
            self.on_result(f"{label} {outcome.said}{taken}{again}")
            if not again:
                contender.keep(part, outcome)
                return

    def _is_up(self, contender: Contender, setting: Setting) -> bool:
        """Start a server; if it does not start, it is said why, and the others play without it."""
        self.on_turn(f"{contender.name} starts", None)
        try:
            contender.start(setting)
        except (RuntimeError, OSError) as error:
            self.on_result(f"{contender.name} is left out: {error}")
            return False
        self.on_result(f"{contender.name} is up")
        return True


def terminate_as_ctrl_c() -> None:
    """From now on a request to terminate is a KeyboardInterrupt, so that it ends the servers too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def turns(
    parts: Sequence[Part], repeats: int, contenders: Sequence[Contender]
) -> Iterator[tuple[Part, int, Contender]]:
    """Who plays what when: the servers side by side, each first in its turn."""
    for part in parts:
        for repeat in range(repeats):
            first = repeat % len(contenders) if contenders else 0
            for contender in (*contenders[first:], *contenders[:first]):
                yield part, repeat, contender


def seconds_left(ahead: Sequence[tuple[Part, Contender]], slow: float) -> float | None:
    """How long the turns ahead will take: as long as the same turn took before, else as all took on average; nothing
    where the contender is done.

    None before anything was played.
    """
    contenders = {id(contender): contender for _, contender in ahead}.values()
    walls = [summary.wall for one in contenders for label in one.played for summary in one.summaries(label)]
    if not walls:
        return None
    average = sum(walls) / len(walls)
    turns_left = [(part, contender) for part, contender in ahead if not contender.is_done(part, slow)]
    return sum(before[-1].wall if (before := one.summaries(part.label)) else average for part, one in turns_left)
