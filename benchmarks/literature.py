"""The scenes that papers on prefix sharing measure, on a server of our own with the cache off and on.

    python benchmarks/literature.py [--scene "tree search" --scene agents ...] [--json FILE]

Few-shot prompts with the two shared lengths of the PagedAttention paper, self-consistency, tree search, agents with
tools, and conversations beside one-shot scans: the same prompts to both servers, throughput and time to first token.
What FILE has of an earlier call is kept and shown, unless it is played again: one scene a call will do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from caudex.bench.demo import play_without_and_with_cache
from caudex.bench.player import Scale
from caudex.bench.run import Plan
from caudex.bench.scenes import SCENES
from caudex.bench.summary import Summary
from caudex.bench.tables import Row, show
from contenders import report_error


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


Pair: TypeAlias = tuple[Summary, Summary]
"""The figures of one scene without the cache and with it."""


def play(name: str, repeats: int, options: list[str]) -> Pair:
    published = PLAYED[name]
    plan = Plan([SCENES[published.scene]], published.scale, repeats, cold_runs=False, seed=7)
    options = [*published.options, *options]

    def tell(caching: bool) -> None:
        print(f"{name}: plays with the cache {'on' if caching else 'off'}", file=sys.stderr)

    return asyncio.run(play_without_and_with_cache(plan, options, tell, report_error))[0]


def load(file: Path) -> dict[str, Pair]:
    kept = json.loads(file.read_text())
    return {name: (Summary(**pair["off"]), Summary(**pair["on"])) for name, pair in kept.items() if name in PLAYED}


def save(found: dict[str, Pair], file: Path) -> None:
    figures = {name: {"off": asdict(off), "on": asdict(on)} for name, (off, on) in found.items()}
    file.write_text(json.dumps(figures, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", action="append", choices=list(PLAYED), help="which to play; all unless given")
    parser.add_argument("--repeats", type=int, default=1, help="of a scene, each with fresh text (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures in a file")
    parser.add_argument("options", nargs="*", help="passed on to caudex serve")
    arguments = parser.parse_args()
    file = arguments.json
    found = load(file) if file is not None and file.exists() else {}
    for name in arguments.scene or PLAYED:
        found[name] = play(name, arguments.repeats, arguments.options)
        if file is not None:
            save(found, file)
    pairs = [(name, *found[name]) for name in PLAYED if name in found]
    rows = [row for name, off, on in pairs for row in (Row(name, "off", off), Row(name, "on", on, off))]
    show("The same prompts, without and with the prefix cache", "cache", rows)


if __name__ == "__main__":
    main()
