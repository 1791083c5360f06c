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
from dataclasses import asdict, replace
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
from servers import VLLM, VLLM_SPACE, LlamaCpp, Server, Setting, Tuning

SHORT = {
    "a document": ("document", Scale(concurrency=4, questions=12, document_tokens=800, answer_tokens=16)),
    "b conversation": ("conversation", Scale(sessions=4, turns=3, answer_tokens=32)),
    "c repeat": ("repeat", Scale(document_tokens=800)),
    "d decode": ("decode", Scale(decode_tokens=64)),
}


def vllm_settings(program: str | None) -> dict[str, Server]:
    """One change at a time to eager mode with blocks of 32 and one thread, then what was best together."""
    eager, ngram = "--enforce-eager", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    base = VLLM(program=program).tuned(Tuning((eager,), VLLM_SPACE))

    def tuned(*options: str, **environment: str) -> Server:
        return base.tuned(Tuning(options, {**VLLM_SPACE, **environment}))

    return {
        "eager, blocks of 32": base,
        "blocks of 128 (default)": replace(base, block_size=128),
        "compiled": tuned(),
        "two threads": tuned(eager, VLLM_CPU_OMP_THREADS_BIND="0-1"),
        "threads not bound": tuned(eager, VLLM_CPU_OMP_THREADS_BIND="nobind"),
        "4,096 tokens a step": tuned(eager, "--max-num-batched-tokens", "4096"),
        "512 tokens a step": tuned(eager, "--max-num-batched-tokens", "512"),
        "n-gram speculation": tuned(eager, "--speculative-config", json.dumps(ngram)),
        "KV split off": tuned(eager, VLLM_CPU_ATTN_SPLIT_KV="0"),
        "compiled, two threads": tuned(VLLM_CPU_OMP_THREADS_BIND="0-1"),
    }


def llama_settings(program: str | None, bf16: Path | None) -> dict[str, Server]:
    """One change at a time to eight slots with a part of the buffer each."""
    base = LlamaCpp(program=program)
    found: dict[str, Server] = {
        "4-bit, 8 slots": base,
        "unified KV": base.tuned(Tuning(("--kv-unified",))),
        "flash attention off": base.tuned(Tuning(("-fa", "off"))),
        "flash attention on": base.tuned(Tuning(("-fa", "on"))),
        "batches of 512 in 128s": base.tuned(Tuning(("-b", "512", "-ub", "128"))),
        "batches of 2,048 whole": base.tuned(Tuning(("-ub", "2048"))),
        "reuse of shifted chunks": base.tuned(Tuning(("--cache-reuse", "64"))),
        "no copies of idle slots": base.tuned(Tuning(("--cache-ram", "0"))),
        "n-gram speculation": base.tuned(Tuning(("--spec-type", "ngram-simple"))),
    }
    if bf16 is not None:
        found["bf16, 8 slots"] = replace(base, model=bf16)
        found["bf16, unified KV"] = replace(base.tuned(Tuning(("--kv-unified",))), model=bf16)
    return found


async def play_short(url: str) -> dict[str, Summary]:
    endpoint = Endpoint(url, await first_model(Endpoint(url, "")), timeout=150.0)
    summaries = {}
    for label, (scene, scale) in SHORT.items():
        plan = Plan([SCENES[scene]], scale, cold_runs=False, seed=11)
        (summaries[label],) = await play(endpoint, plan, lambda scene, record: None)
    return summaries


def measure(server: Server) -> dict[str, Summary]:
    setting, port = Setting(), free_port()
    with running(server.command(setting, port), port, environment=server.tuning(setting).environment) as local:
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
    parser.add_argument("--bf16", type=Path, metavar="GGUF", help="the same weights in bfloat16, for llama.cpp")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    options = parser.parse_args()
    settings = (
        vllm_settings(options.vllm) if options.server == "vllm" else llama_settings(options.llama_server, options.bf16)
    )
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
