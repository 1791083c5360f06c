"""What a server's settings bring: each of a short list on short versions of the scenes of `serving.py`.

    python benchmarks/server_settings.py vllm --vllm PATH [--only eager ...] [--json FILE]
    python benchmarks/server_settings.py llama.cpp --llama-server PATH
    python benchmarks/server_settings.py caudex --repeats 3

Each setting is one change to what `serving.py` starts. `--together` of them are up at once and play by turns, every one
with the same prompts; figures are medians over the repeats. What FILE has of an earlier call is kept, shown, and played
again only where it is named, so a long list can be played in several sittings. `serving.py` starts each peer with what
is best here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import serving
from caudex.bench.player import Scale
from caudex.bench.tables import duration
from contenders import Contender, Match, Part, Patience, terminate_as_ctrl_c
from servers import NGRAMS, VLLM, Caudex, LlamaCpp, Server, Setting, every_core, vllm_environment
from standings import median, more_is_better, print_markdown, print_table

SHORT = (
    Part("a", "document", Scale(concurrency=4, questions=12, document_tokens=800, answer_tokens=16)),
    Part("b", "conversation", Scale(sessions=4, turns=3, answer_tokens=32)),
    Part("c", "repeat", Scale(document_tokens=800)),
    Part("d", "decode", Scale(decode_tokens=64)),
    Part("m", "mixed", Scale(sessions=3, turns=3, document_tokens=800, answer_tokens=32)),
)
FULL = (
    *(part for parts in serving.PARTS.values() for part in parts if part.letter in "abcd"),
    Part("m", "mixed", Scale(document_tokens=1_000)),
)
FIGURES = (
    ("a", "wall"),
    ("b", "wall"),
    ("c", "ttft_p50_cold"),
    ("c", "ttft_p50_hot"),
    ("d", "output_tokens_per_second"),
    ("m", "inter_token_p50"),
    ("m", "inter_token_p99"),
)
HEADINGS = ("setting", "a wall", "b wall", "c cold", "c hot", "d tokens/s", "m between tokens", "p99", "failed")


def vllm_settings(program: str | None) -> dict[str, Server]:
    """One change at a time to what `serving.py` starts: compiled, blocks of 32, a thread a core."""

    def started(*options: str, cores: str = every_core(), block_size: int = 32, **environment: str) -> Server:
        environment = vllm_environment(cores) | environment
        return VLLM(options=options, environment=environment, program=program, block_size=block_size)

    return {
        "used": started(),
        "eager": started("--enforce-eager"),
        "blocks of 16": started(block_size=16),
        "blocks of 64": started(block_size=64),
        "blocks of 128 (default)": started(block_size=128),
        "a core left to the front end (default)": started(cores="auto"),
        "threads not bound": started(cores="nobind"),
        "512 tokens a step": started("--max-num-batched-tokens", "512"),
        "1,024 tokens a step": started("--max-num-batched-tokens", "1024"),
        "4,096 tokens a step": started("--max-num-batched-tokens", "4096"),
        "n-gram speculation": VLLM(program=program, guesses=True),
        "n-gram speculation, 4 tokens": started(
            "--speculative-config", json.dumps(NGRAMS | {"num_speculative_tokens": 4})
        ),
        "KV split off": started(VLLM_CPU_ATTN_SPLIT_KV="0"),
        "Intel's OpenMP": started(LD_PRELOAD=str(intel_openmp(program))),
        "w8a8": VLLM(program=program, weights="w8a8"),
        "w8a8, n-gram speculation": VLLM(program=program, weights="w8a8", guesses=True),
    }


def intel_openmp(program: str | None) -> Path:
    """libiomp5 beside a vLLM program, which its manual advises to load."""
    return Path(program or shutil.which("vllm") or "vllm").parent.parent / "lib" / "libiomp5.so"


def llama_settings(program: str | None) -> dict[str, Server]:
    """One change at a time to what `serving.py` starts: bfloat16 with a part of the KV buffer for each slot."""

    def started(*options: str, weights: str = "bf16") -> Server:
        return LlamaCpp(options=options, program=program, weights=weights)

    return {
        "used": started(),
        "flash attention on": started("-fa", "on"),
        "flash attention off": started("-fa", "off"),
        "one buffer for all slots": started("--kv-unified"),
        "twice the slots": started("-np", "16"),
        "batches of 2,048 whole": started("-ub", "2048"),
        "batches of 512 in 128s": started("-b", "512", "-ub", "128"),
        "reuse of shifted chunks": started("--cache-reuse", "64"),
        "no copies of idle slots": started("--cache-ram", "0"),
        "KV in bf16": started("-ctk", "bf16", "-ctv", "bf16"),
        "no spinning": started("--poll", "0"),
        "threads bound to cores": started("--cpu-range", every_core(), "--cpu-strict", "1"),
        "n-gram speculation": LlamaCpp(program=program, guesses=True),
        "q8_0": started(weights="q8_0"),
        "q4_0": started(weights="q4_0"),
        "q4_1, the model's own file": started(weights="q4_1"),
    }


def caudex_settings() -> dict[str, Server]:
    """One change at a time to what `caudex serve` does unasked."""

    def started(*options: str, block_size: int = 16) -> Server:
        return Caudex(options=options, block_size=block_size)

    return {
        "used": started(),
        **{
            f"{tokens:,} tokens a step": started("--max-num-batched-tokens", str(tokens))
            for tokens in (256, 1024, 2048)
        },
        "blocks of 32": started(block_size=32),
    }


def rows(contenders: Sequence[Contender], parts: Sequence[Part]) -> list[list[str]]:
    return [row(contender, {part.letter: part.label for part in parts}) for contender in contenders]


def row(contender: Contender, labels: dict[str, str]) -> list[str]:
    """A setting's medians; under "failed" its requests that failed and the parts it did not get through."""
    played = [summary for label in labels.values() for summary in contender.played.get(label, [])]
    failed = sum(1 if summary is None else summary.errors for summary in played)
    cells = (figure_cell(contender, labels[letter], figure) for letter, figure in FIGURES)
    return [contender.name, *cells, str(failed or "")]


def figure_cell(contender: Contender, label: str, figure: str) -> str:
    value = median(contender.summaries(label), figure)
    if value is None:
        return "-"
    return f"{value:.0f}" if more_is_better(figure) else duration(value)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=["caudex", "vllm", "llama.cpp"])
    parser.add_argument("--only", action="append", metavar="SETTING", help="may be repeated; all unless given")
    parser.add_argument("--scenes", default="abcd", metavar="LETTERS", help="of abcdm (default: abcd); m is mixed load")
    parser.add_argument("--full", action="store_true", help="scenes as long as those of serving.py")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--together", type=int, default=4, help="settings that are up at once (default: 4)")
    parser.add_argument("--limit", type=float, default=75.0, help="seconds that a part may take")
    parser.add_argument("--seed", type=int, default=11, help="of the text")
    parser.add_argument("--vllm", metavar="PATH", help="the program vllm, if it is not on PATH")
    parser.add_argument("--llama-server", metavar="PATH", help="the program llama-server, if it is not on PATH")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures in a file")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser.parse_args()


def settings_of(options: argparse.Namespace) -> dict[str, Server]:
    if options.server == "caudex":
        return caudex_settings()
    return vllm_settings(options.vllm) if options.server == "vllm" else llama_settings(options.llama_server)


def play(contenders: Sequence[Contender], parts: tuple[Part, ...], options: argparse.Namespace) -> None:
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:
        for first in range(0, len(contenders), options.together):
            Match(
                contenders[first : first + options.together],
                {Setting(): parts},
                Patience(slow=options.limit, limit=options.limit),
                lambda what, left: status.update(what if left is None else f"{what}, about {left:.0f} s left"),
                lambda said: console.print(said, markup=False),
            ).play(options.repeats, options.seed)


def main() -> None:
    options = parse_arguments()
    contenders = {name: Contender(server, name) for name, server in settings_of(options).items()}
    if unknown := set(options.only or ()) - set(contenders):
        sys.exit(f"no setting is called {', '.join(sorted(unknown))}: there are {', '.join(contenders)}")
    if missing := next(iter(contenders.values())).server.missing():
        sys.exit(missing)
    known = FULL if options.full else SHORT
    parts = tuple(part for part in known if part.letter in options.scenes)
    wanted = options.only or list(contenders)
    if options.json is not None and options.json.exists():
        for kept in json.loads(options.json.read_text()):
            if kept["server"] in contenders and kept["server"] not in wanted:
                contenders[kept["server"]].add_json(kept)
    terminate_as_ctrl_c()
    try:
        play([contenders[name] for name in wanted], parts, options)
    except KeyboardInterrupt:
        print("stopped: here is what was played", file=sys.stderr)
    played = [contender for contender in contenders.values() if contender.played]
    (print_markdown if options.markdown else print_table)(HEADINGS, rows(played, known), 1)
    if options.json is not None:
        options.json.write_text(json.dumps([contender.as_json() for contender in played], indent=1))


if __name__ == "__main__":
    main()
