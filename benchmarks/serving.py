"""Caudex, vLLM and llama.cpp serving the same model to the same client, side by side in one run.

    python benchmarks/serving.py --json serving.json [--vllm PATH] [--llama-server PATH]

Scenes (`caudex.bench.scenes`), each with fresh text every repeat:
  a  document      32 questions on one document of 1,500 tokens, 8 at a time
  b  conversation  8 sessions of 4 turns under one system prompt
  c  repeat        one prompt of 1,500 tokens cold, then hot
  d  decode        8 answers of 128 tokens at once
  e  round-robin   6 documents x 6 questions, all queued at once, two run at a time: in a pool for all of them ("fits"),
                   and in a pool for three ("thrash")

Every server runs at the settings that served it best here (`servers.py`), on the same weights in bfloat16. A server
that is not installed is left out, and it is said how to install it. All are started first; then each plays a part in
turn, in another order every repeat, while the others are stopped, so that a machine that is faster for a while is
faster for all. Figures are medians over the repeats.

A server that needs longer than `--slow` seconds for a part plays it once. One that uses no processor time for a while
with requests open, or is not done after `--limit` seconds, is killed, started again for the next part, and the part
counts as not answered. Peak memory is that of a server's whole process tree; start-up runs to its first healthy answer.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from caudex.bench.client import Endpoint, Record, ServerError, first_model
from caudex.bench.local import LocalServer, free_port, running
from caudex.bench.player import Scale
from caudex.bench.run import Plan, play
from caudex.bench.scenes import SCENES
from caudex.bench.summary import Summary
from caudex.bench.tables import duration
from servers import VLLM, Caudex, LlamaCpp, Server, Setting

SCALE = Scale(answer_tokens=32)
CONVERSATION = Scale(answer_tokens=64)
RUNNING_AT_ONCE = 2
DOCUMENTS_THAT_FIT = 3
THRASH_TOKENS = DOCUMENTS_THAT_FIT * (SCALE.document_tokens + 100)
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


PARTS: dict[Setting, tuple[Part, ...]] = {
    Setting(): (
        Part("a", "document", SCALE),
        Part("b", "conversation", CONVERSATION),
        Part("c", "repeat", SCALE),
        Part("d", "decode", SCALE),
    ),
    Setting(max_running=RUNNING_AT_ONCE): (Part("e", "round-robin", SCALE, "fits"),),
    Setting(THRASH_TOKENS, RUNNING_AT_ONCE): (Part("e", "round-robin", SCALE, "thrash"),),
}


class NoAnswerError(Exception):
    """A server stopped answering; the message says how that was seen."""


@dataclass
class Contender:
    """A server and its figures: a Summary a repeat of each part, None where it did not answer.

    `startup` (seconds) and `peak_memory` (bytes) are those of the first setting.
    """

    server: Server
    played: dict[str, list[Summary | None]] = field(default_factory=dict)
    startup: float = 0.0
    peak_memory: int | None = None
    _process: ExitStack = field(default_factory=ExitStack)
    _local: LocalServer | None = None

    @property
    def name(self) -> str:
        return self.server.name

    def start(self, setting: Setting) -> None:
        """Start the server, and stop all of its processes until it plays."""
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

    def play(self, part: Part, setting: Setting, seed: int, limit: float) -> str:
        """Play a part once, and say what came of it."""
        try:
            self.start(setting)
            assert self._local is not None
            self._local.resume()
            summary = asyncio.run(play_watched(self._local, part, seed, limit))
        except (NoAnswerError, ServerError, OSError, RuntimeError) as error:
            self.played.setdefault(part.label, []).append(None)
            self.end()
            return f"does not answer: {error}"
        self._local.pause()
        self.played.setdefault(part.label, []).append(summary)
        return f"{summary.wall:.1f} s" + (f", {summary.errors} failed" if summary.errors else "")


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


def report_error(scene: str, record: Record) -> None:
    if record.error is not None:
        print(f"failed in {scene}: {record.error}", file=sys.stderr)


def compare(contenders: list[Contender], letters: str, repeats: int, seed: int, slow: float, limit: float) -> None:
    """Play every part that `letters` names; what was measured is in the contenders."""
    for setting, parts in PARTS.items():
        wanted = [part for part in parts if part.letter in letters]
        if not wanted:
            continue
        try:
            started = [contender for contender in contenders if is_up(contender, setting)]
            for part, repeat, contender in turns(wanted, repeats, started):
                if not contender.is_done(part, slow):
                    said = contender.play(part, setting, seed + repeat, limit)
                    print(f"{part.label} {repeat + 1}/{repeats}: {contender.name} {said}", file=sys.stderr)
        finally:
            for contender in contenders:
                contender.end()


def is_up(contender: Contender, setting: Setting) -> bool:
    """Start a server; if it does not start, it is said why, and the others play without it."""
    try:
        contender.start(setting)
    except (RuntimeError, OSError) as error:
        print(f"{contender.name} is left out: {error}", file=sys.stderr)
        return False
    print(f"{contender.name} is up", file=sys.stderr)
    return True


def turns(
    parts: Sequence[Part], repeats: int, contenders: Sequence[Contender]
) -> Iterator[tuple[Part, int, Contender]]:
    """Who plays what when: the servers side by side, each first in its turn."""
    for part in parts:
        for repeat in range(repeats):
            first = repeat % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                yield part, repeat, contender


def median(summaries: Sequence[Summary], figure: str) -> float | None:
    values = [value for summary in summaries if (value := getattr(summary, figure)) is not None]
    return statistics.median(values) if values else None


def row(label: str, contender: Contender, ours: Contender) -> list[str]:
    """A part's figures of one server, with its ratios to those of `ours`."""
    summaries = [summary for summary in contender.played.get(label, []) if summary is not None]
    if not summaries:
        return [label, contender.name, "no answer", *[""] * (len(HEADINGS) - 3)]
    baseline = [summary for summary in ours.played.get(label, []) if summary is not None]
    hit_rate = median(summaries, "hit_rate")
    walls = [summary.wall for summary in summaries]
    return [
        label,
        contender.name,
        str(len(summaries)),
        f"{duration(statistics.median(walls))} ({min(walls):.1f}-{max(walls):.1f})",
        ratio(median(summaries, "wall"), median(baseline, "wall")),
        duration(median(summaries, "ttft_p50")),
        ratio(median(summaries, "ttft_p50"), median(baseline, "ttft_p50")),
        duration(median(summaries, "ttft_p50_cold")),
        duration(median(summaries, "ttft_p50_hot")),
        "not told" if hit_rate is None else f"{hit_rate:.1%}",
        f"{median(summaries, 'output_tokens_per_second') or 0:.0f}",
        str(sum(summary.errors for summary in summaries) or ""),
    ]


HEADINGS = (
    "scene",
    "server",
    "repeats",
    "wall (least-most)",
    "ratio",
    "TTFT p50",
    "ratio",
    "cold",
    "hot",
    "hit rate",
    "tokens/s",
    "failed",
)


def ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.2f}x" if theirs and ours else ""


def rows(contenders: Sequence[Contender]) -> list[list[str]]:
    labels = [part.label for parts in PARTS.values() for part in parts]
    return [
        row(label, contender, contenders[0])
        for label in labels
        for contender in contenders
        if contender.played.get(label)
    ]


def show(contenders: Sequence[Contender]) -> None:
    """The figures side by side, with each server's wall and first-token times over the first one's."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=True)
    for cells in rows(contenders):
        table.add_row(*cells)
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)
    for contender in contenders:
        console.print(costs(contender), highlight=False)


def show_markdown(contenders: Sequence[Contender]) -> None:
    """The same as a table for a document."""
    for cells in (HEADINGS, ("---",) * len(HEADINGS), *rows(contenders)):
        print(f"| {' | '.join(cells)} |")
    print("\n" + "; ".join(map(costs, contenders)))


def costs(contender: Contender) -> str:
    memory = contender.peak_memory
    peak = "unknown" if memory is None else f"{memory / 2**20:,.0f} MiB"
    return f"{contender.name}: start-up {contender.startup:.1f} s, peak memory {peak}"


def as_json(contenders: Sequence[Contender], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "version": 2,
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "arguments": {name: getattr(options, name) for name in ("repeats", "seed", "scenes", "slow", "limit")},
        "results": [
            {
                "server": contender.name,
                "options": [*contender.server.options],
                "environment": {**contender.server.environment},
                "startup": contender.startup,
                "peak_memory": contender.peak_memory,
                "parts": {
                    label: [summary and dataclasses.asdict(summary) for summary in summaries]
                    for label, summaries in contender.played.items()
                },
            }
            for contender in contenders
        ],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scenes", default="abcde", help="letters of the scenes to play")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the text; another one every time")
    parser.add_argument("--only", action="append", choices=["caudex", "vllm", "llama.cpp"], help="may be repeated")
    parser.add_argument("--slow", type=float, default=20.0, help="seconds from which on a part is played once")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a part may take")
    parser.add_argument("--vllm", help="path of the program vllm")
    parser.add_argument("--llama-server", help="path of the program llama-server")
    return parser.parse_args()


def installed(options: argparse.Namespace) -> list[Contender]:
    contenders = []
    for server in (Caudex(), VLLM(program=options.vllm), LlamaCpp(program=options.llama_server)):
        missing = server.missing()
        if options.only and server.name.lower() not in options.only:
            continue
        if missing is None:
            contenders.append(Contender(server))
        else:
            print(f"left out: {missing}", file=sys.stderr)
    return contenders


def main() -> None:
    options = parse_arguments()
    contenders = installed(options)
    try:
        compare(contenders, options.scenes, options.repeats, options.seed, options.slow, options.limit)
    except KeyboardInterrupt:
        print("stopped: here is what was played", file=sys.stderr)
    (show_markdown if options.markdown else show)(contenders)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(contenders, options), indent=1))


if __name__ == "__main__":
    main()
