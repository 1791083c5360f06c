"""Log analysis side by side: Caudex, and the analyzers of PyPI that are installed.

    python benchmarks/analysis.py TRACES [--tokenizer DIR] [--peers BIN]

TRACES is a folder with `text/tau_airline.openai.jsonl.gz` and `hash/kvct_small.jsonl.gz`. Each tool is a command of its
own; wall time, CPU time and peak memory are the kernel's figures for that process and its children.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    tool: str
    log: str
    seconds: float
    cpu_seconds: float
    peak_mib: float
    result: str


def measure(tool: str, log: str, command: list[str], result_of: object = None) -> Run:
    """Runs a command in a fresh child whose resource use is its own."""
    start = time.perf_counter()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        note = "ok" if done.returncode == 0 else (done.stderr or done.stdout).strip().splitlines()[-1:][0][:90]
        os.write(writer, json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, note]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        cpu, peak, note = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return Run(
        tool, log, time.perf_counter() - start, cpu, peak, note if result_of is None else f"{note}; {result_of()}"
    )  # type: ignore[operator]


def caudex(log: Path, out: Path, *options: str, tool: str = "caudex analyze") -> Run:
    def figures() -> str:
        report = json.loads(out.read_text())
        return f"hit rate {report['infinite_hit_rate']:.4f}, {len(report['breakers'])} breakers"

    command = [sys.executable, "-m", "caudex.cli", "analyze", str(log), "--json", str(out), *options]
    return measure(tool, log.name, command, figures)


def peers(folder: Path | None, tau: Path, kvct: Path, tokenizer: str, out: Path) -> list[Run]:
    """The peers' own commands, each on the log that it reads, unpacked."""
    runs = []
    commands = {
        "kvlint": ["analyze", str(tau), "--model", tokenizer],
        "llmtrafficlens": ["profile", "--format", "mooncake", "--block-size", "64", str(kvct), "-o", str(out)],
        "kvcache-simulator": ["run", "--trace", str(kvct), "--model", "deepseek-v3", "--policies", "fifo,lru,optimal"],
    }
    for name, arguments in commands.items():
        program = shutil.which(name, path=None if folder is None else str(folder))
        if program is None:
            print(f"{name} is not installed", file=sys.stderr)
        else:
            log = tau if name == "kvlint" else kvct
            runs.append(measure(name, log.name, [program, *arguments]))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--peers", type=Path, help="folder with the peers' commands, if not on the path")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        tau = options.traces / "text" / "tau_airline.openai.jsonl.gz"
        plain = Path(folder) / "tau_airline.jsonl"
        plain.write_bytes(gzip.decompress(tau.read_bytes()))
        kvct = options.traces / "hash" / "kvct_small.jsonl.gz"
        hashes = Path(folder) / "kvct_small.jsonl"
        hashes.write_bytes(gzip.decompress(kvct.read_bytes()))
        tokens = Path(folder) / "tau_airline.parquet"
        convert = [sys.executable, "-m", "caudex.cli", "trace", "convert", str(tau), str(tokens)]
        runs = [
            caudex(tau, out, "--tokenizer", options.tokenizer),
            measure("caudex trace convert", tau.name, [*convert, "--tokenizer", options.tokenizer]),
            caudex(tokens, out),
            caudex(kvct, out),
            caudex(kvct, out, "--policies", "lru,fifo", tool="caudex, lru and fifo"),
            *peers(options.peers, plain, hashes, options.tokenizer, out),
        ]
    print(f"{'tool':22} {'log':28} {'wall s':>8} {'CPU s':>8} {'MiB':>7}  result")
    for run in runs:
        print(f"{run.tool:22} {run.log:28} {run.seconds:8.1f} {run.cpu_seconds:8.1f} {run.peak_mib:7.0f}  {run.result}")


if __name__ == "__main__":
    main()
