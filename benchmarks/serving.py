"""Caudex, vLLM and llama.cpp serving the same model to the same client, side by side in one run.

    python benchmarks/serving.py --json serving.json [--vllm PATH] [--llama-server PATH]
    python benchmarks/serving.py --bits 16 --bits 8                       # weights in 8 bits beside bfloat16
    python benchmarks/serving.py --scenes cd --only caudex --repeats 1       # a minute: does it run here?

Scenes (`caudex.bench.scenes`), each with fresh text every repeat:
  a  document      32 questions on one document of 1,500 tokens, 8 at a time
  b  conversation  8 sessions of 4 turns under one system prompt
  c  repeat        one prompt of 1,500 tokens cold, then hot
  d  decode        8 answers of 128 tokens at once
  e  round-robin   6 documents x 6 questions, all queued at once, two run at a time: in a pool for all of them ("fits"),
                   and in a pool for three ("thrash")

Servers: each at the settings that served it best here (`servers.py`; `server_settings.py` tries them). A server that is
not installed is left out, and it is said how to install it.
  16 bits  Caudex, vLLM and llama.cpp with the same bfloat16 weights
   8 bits  Caudex int8 (with KV in bfloat16, and in 8 bits), vLLM w8a8 (compressed-tensors), llama.cpp q8_0
   4 bits  Caudex int4, llama.cpp q4_0 and q4_1
Caudex guesses tokens from the text so far unasked; peers are played with n-gram speculation and without.

All are started first; then each plays a part in turn, in another order every repeat, while the others are stopped, so
that a machine that is faster for a while is faster for all. Figures are medians over the repeats. The second table
holds Caudex against the fastest peer whose weights have as many bits, and against the fastest whatever they have.

A server that needs longer than `--slow` seconds for a part plays it once. One that uses no processor time for a while
with requests open, or is not done after `--limit` seconds, is killed, started again for the next part, and the part
counts as not answered. A turn during which other processes took more than a twentieth of the processor is played again,
up to three times. Peak memory is that of a server's whole process tree; start-up runs to its first healthy answer.
Ctrl-C ends all servers and shows what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from caudex.bench.player import Scale
from contenders import Contender, Match, Part, Patience, terminate_as_ctrl_c
from servers import VLLM, Caudex, LlamaCpp, Server, Setting
from standings import show, standings

SCALE = Scale(answer_tokens=32)
CONVERSATION = Scale(answer_tokens=64)
RUNNING_AT_ONCE = 2
DOCUMENTS_THAT_FIT = 3
THRASH_TOKENS = DOCUMENTS_THAT_FIT * (SCALE.document_tokens + 100)

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
FORMAT = 3


def known_servers(vllm: str | None, llama_server: str | None) -> list[Server]:
    return [
        Caudex(),
        VLLM(program=vllm),
        VLLM(program=vllm, guesses=True),
        LlamaCpp(program=llama_server),
        LlamaCpp(program=llama_server, guesses=True),
        Caudex(weights="int8"),
        Caudex(weights="int8", kv_cache_dtype="int8"),
        VLLM(program=vllm, weights="w8a8"),
        VLLM(program=vllm, weights="w8a8", guesses=True),
        Caudex(weights="int4"),
        *(LlamaCpp(program=llama_server, weights=weights) for weights in ("q8_0", "q4_0", "q4_1")),
    ]


def chosen(contenders: Sequence[Contender], options: argparse.Namespace) -> list[Contender]:
    """Those that were asked for and are there; of those that are not there it is said how to install them."""
    wanted = [
        contender
        for contender in contenders
        if contender.server.bits in options.bits
        and (not options.only or contender.server.program_name.lower() in options.only)
    ]
    for remedy in sorted({remedy for contender in wanted if (remedy := contender.server.missing())}):
        print(f"left out: {remedy}", file=sys.stderr)
    return [contender for contender in wanted if contender.server.missing() is None]


def chosen_parts(letters: str) -> dict[Setting, tuple[Part, ...]]:
    return {setting: tuple(part for part in parts if part.letter in letters) for setting, parts in PARTS.items()}


def play(contenders: Sequence[Contender], options: argparse.Namespace) -> None:
    """Play what was asked for, with a line on stderr that says what goes on now and how long is left."""
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:

        def tell(what: str, left: float | None) -> None:
            status.update(what if left is None else f"{what}, about {left / 60:.0f} min left")

        parts = chosen_parts(options.scenes)
        patience = Patience(options.slow, options.limit)
        match = Match(contenders, parts, patience, tell, lambda said: console.print(said, markup=False))
        match.play(options.repeats, options.seed)


def as_json(contenders: Sequence[Contender], options: argparse.Namespace, where: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": FORMAT,
        "machine": where,
        "arguments": {name: getattr(options, name) for name in ("repeats", "seed", "slow", "limit")},
        "results": [
            {
                **contender.as_json(),
                "version": program_version(contender.server),
                "command": shlex.join(contender.server.command(Setting(), 0)),
            }
            for contender in contenders
            if contender.played
        ],
        "standings": [
            {
                "scene": standing.part.label,
                "figure": standing.figure,
                "caudex": standing.ours.name,
                "peer": standing.peer.name,
                "same_bits": standing.peer.server.bits == standing.ours.server.bits,
                "lead": standing.lead,
            }
            for any_bits in (False, True)
            for standing in standings(contenders, all_parts(), any_bits=any_bits).values()
            if standing.peer is not None
        ],
    }


def all_parts() -> list[Part]:
    return [part for parts in PARTS.values() for part in parts]


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "processor": processor(),
        "cpus": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "load_before": os.getloadavg()[0],
    }


def processor() -> str:
    """Its name and what it can do that matters here, where the system tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    told = {name.strip(): value.strip() for name, value in told.items()}
    extensions = [flag for flag in told.get("flags", "").split() if flag.startswith(("avx", "amx"))]
    return " ".join([told.get("model name", platform.processor() or platform.machine()), *extensions])


def program_version(server: Server) -> str:
    if isinstance(server, Caudex):
        return version("caudex")
    program = server.command(Setting(), 0)[0]
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120, check=False)
    lines = (said.stdout.strip() or said.stderr.strip()).splitlines()
    return "; ".join(lines[-2:]) or "unknown"


def keep_earlier(contenders: Sequence[Contender], file: Path) -> None:
    """Count what FILE has of an earlier run as these servers' first repeats."""
    kept = json.loads(file.read_text())
    if kept.get("version") != FORMAT:
        sys.exit(f"{file} is of version {kept.get('version')}, not {FORMAT}: name another file")
    found = {result["server"]: result for result in kept["results"]}
    for contender in contenders:
        if (earlier := found.get(contender.name)) is None:
            continue
        if not contender.is_of(earlier):
            sys.exit(f"{file} has {contender.name} with other settings: name another file")
        contender.add_json(earlier)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, machine and settings to a file")
    parser.add_argument("--add", action="store_true", help="count what FILE has as repeats: several sittings")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--repeats", type=int, default=3, help="of every part, medians are shown (default: 3)")
    parser.add_argument("--scenes", default="abcde", metavar="LETTERS", help="scenes to play (default: abcde)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the text; another one every time")
    parser.add_argument(
        "--bits", type=int, action="append", choices=[16, 8, 4], help="of the weights; may be repeated (default: 16)"
    )
    parser.add_argument(
        "--only", action="append", choices=["caudex", "vllm", "llama.cpp"], help="may be repeated (default: all)"
    )
    parser.add_argument("--slow", type=float, default=20.0, help="seconds from which on a part is played once")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a part may take")
    parser.add_argument("--vllm", metavar="PATH", help="the program vllm, if it is not on PATH")
    parser.add_argument("--llama-server", metavar="PATH", help="the program llama-server, if it is not on PATH")
    options = parser.parse_args()
    options.bits = options.bits or [16]
    if unknown := set(options.scenes) - {part.letter for part in all_parts()}:
        parser.error(f"there is no scene {', '.join(sorted(unknown))}: scenes are a, b, c, d and e")
    if options.add and options.json is None:
        parser.error("--add needs --json FILE, whose repeats it adds to")
    return options


def main() -> None:
    options = parse_arguments()
    terminate_as_ctrl_c()
    contenders = [Contender(server) for server in known_servers(options.vllm, options.llama_server)]
    if options.add and options.json.exists():
        keep_earlier(contenders, options.json)
    where = machine()
    try:
        play(chosen(contenders, options), options)
    except KeyboardInterrupt:
        print("stopped: here is what was played", file=sys.stderr)
    show(contenders, all_parts(), markdown=options.markdown)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(contenders, options, where), indent=1))


if __name__ == "__main__":
    main()
