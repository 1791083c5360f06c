"""The scenes that papers on prefix sharing measure, on a server of our own with the cache off and on.

    python benchmarks/literature.py [--scene few-shot --scene tree ...] [--json FILE]

Few-shot prompts with the two shared lengths of the PagedAttention paper, self-consistency, tree search, agents with
tools, and conversations beside one-shot scans: the same prompts to both servers, throughput and time to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from caudex.bench.demo import play_without_and_with_cache
from caudex.bench.player import Scale
from caudex.bench.run import Plan
from caudex.bench.scenes import SCENES
from caudex.bench.summary import Summary
from caudex.bench.tables import Row, show


@dataclass(frozen=True, slots=True)
class Published:
    """A scene as papers play it, small enough for a CPU: less than a minute without the cache on two cores."""

    scene: str
    scale: Scale
    options: tuple[str, ...] = ()


SMALL_POOL = ("--block-size", "16", "--num-blocks", "512")
"""Room for 8,192 tokens: the conversations of `mixed` and two thirds of what its scans read."""

PLAYED = {
    "few-shot, 80 shared": Published("few-shot", Scale(example_tokens=80)),
    "few-shot, 341 shared": Published("few-shot", Scale(example_tokens=341)),
    "self-consistency": Published("samples", Scale()),
    "tree search": Published("tree", Scale()),
    "agents": Published("agents", Scale(sessions=4)),
    "mixed with scans": Published("mixed", Scale(sessions=6, document_tokens=1_000), SMALL_POOL),
}


def play(name: str, options: list[str]) -> tuple[Summary, Summary]:
    """One scene's summaries, without the cache and with it."""
    published = PLAYED[name]
    plan = Plan([SCENES[published.scene]], published.scale, cold_runs=False, seed=7)
    options = [*published.options, *options]
    pairs = asyncio.run(play_without_and_with_cache(plan, options, lambda caching: None, lambda scene, record: None))
    return pairs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", action="append", choices=list(PLAYED), help="which to play; all unless given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="passed on to caudex serve")
    arguments = parser.parse_args()
    found = {name: play(name, arguments.options) for name in arguments.scene or PLAYED}
    rows = [row for name, (off, on) in found.items() for row in (Row(name, "off", off), Row(name, "on", on, off))]
    show("The same prompts, without and with the prefix cache", "cache", rows)
    if arguments.json is not None:
        figures = {name: {"off": asdict(off), "on": asdict(on)} for name, (off, on) in found.items()}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
