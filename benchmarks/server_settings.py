"""What the settings of a peer bring: each of a short list on short versions of the scenes of `serving.py`.

    python benchmarks/server_settings.py vllm --vllm PATH [--only eager ...] [--json FILE]
    python benchmarks/server_settings.py llama.cpp --llama-server PATH

One server at a time, every setting with the same prompts. `serving.py` starts each peer with what is best here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from caudex.bench.client import Endpoint, first_model
from caudex.bench.local import free_port, running
from caudex.bench.player import Scale
from caudex.bench.run import Plan, play
from caudex.bench.scenes import SCENES
from caudex.bench.summary import Summary
from caudex.bench.tables import duration
from caudex.engine.loading import default_gguf
from servers import VLLM, LlamaCpp, Server, Setting, every_core, vllm_environment

SHORT = {
    "a document": ("document", Scale(concurrency=4, questions=12, document_tokens=800, answer_tokens=16)),
    "b conversation": ("conversation", Scale(sessions=4, turns=3, answer_tokens=32)),
    "c repeat": ("repeat", Scale(document_tokens=800)),
    "d decode": ("decode", Scale(decode_tokens=64)),
}


def vllm_settings(program: str | None) -> dict[str, Server]:
    """One change at a time to eager mode with blocks of 32 and a thread on one core, then what was best together."""
    eager, ngram = "--enforce-eager", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}

    def started(*options: str, cores: str = "auto", block_size: int = 32, **environment: str) -> Server:
        return VLLM(options, vllm_environment(cores) | environment, program, block_size)

    return {
        "eager, blocks of 32": started(eager),
        "blocks of 128 (default)": started(eager, block_size=128),
        "compiled": started(),
        "a thread a core": started(eager, cores=every_core()),
        "threads not bound": started(eager, cores="nobind"),
        "4,096 tokens a step": started(eager, "--max-num-batched-tokens", "4096"),
        "512 tokens a step": started(eager, "--max-num-batched-tokens", "512"),
        "n-gram speculation": started(eager, "--speculative-config", json.dumps(ngram)),
        "KV split off": started(eager, VLLM_CPU_ATTN_SPLIT_KV="0"),
        "compiled, a thread a core": started(cores=every_core()),
    }


def llama_settings(program: str | None) -> dict[str, Server]:
    """One change at a time to bfloat16 with a part of the KV buffer for each slot."""

    def started(*options: str, model: Path | None = None) -> Server:
        return LlamaCpp(options, program=program, model=model)

    return {
        "bf16, a buffer a slot": started(),
        "one buffer for all slots": started("--kv-unified"),
        "4-bit": started(model=default_gguf()),
        "flash attention off": started("-fa", "off"),
        "batches of 2,048 whole": started("-ub", "2048"),
        "batches of 512 in 128s": started("-b", "512", "-ub", "128"),
        "reuse of shifted chunks": started("--cache-reuse", "64"),
        "no copies of idle slots": started("--cache-ram", "0"),
        "n-gram speculation": started("--spec-type", "ngram-simple"),
    }


async def play_short(url: str) -> dict[str, Summary]:
    endpoint = Endpoint(url, await first_model(Endpoint(url, "")), timeout=150.0)
    summaries = {}
    for label, (scene, scale) in SHORT.items():
        plan = Plan([SCENES[scene]], scale, cold_runs=False, seed=11)
        (summaries[label],) = await play(endpoint, plan, lambda scene, record: None)
    return summaries


def measure(server: Server) -> dict[str, Summary]:
    port = free_port()
    with running(server.command(Setting(), port), port, environment=server.environment) as local:
        return asyncio.run(play_short(local.url))


def show(found: dict[str, dict[str, Summary]]) -> None:
    """A row a setting: wall time of each scene, first-token times of the repeated prompt, tokens a second of decode."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("setting", no_wrap=True)
    for heading in ("a wall", "b wall", "c cold", "c hot", "d tokens/s", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, (document, conversation, repeat, decode) in ((name, parts.values()) for name, parts in found.items()):
        failed = sum(part.errors for part in (document, conversation, repeat, decode))
        table.add_row(
            name,
            duration(document.wall),
            duration(conversation.wall),
            duration(repeat.ttft_p50_cold),
            duration(repeat.ttft_p50_hot),
            f"{decode.output_tokens_per_second:.0f}",
            str(failed or ""),
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=["vllm", "llama.cpp"])
    parser.add_argument("--only", action="append", metavar="SETTING", help="may be repeated; all unless given")
    parser.add_argument("--vllm", help="path of the program vllm")
    parser.add_argument("--llama-server", help="path of the program llama-server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    options = parser.parse_args()
    settings = vllm_settings(options.vllm) if options.server == "vllm" else llama_settings(options.llama_server)
    found: dict[str, dict[str, Summary]] = {}
    for name in options.only or settings:
        try:
            found[name] = measure(settings[name])
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(f"{name}: done", file=sys.stderr)
    show(found)
    if options.json is not None:
        figures = {name: {label: asdict(part) for label, part in parts.items()} for name, parts in found.items()}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
