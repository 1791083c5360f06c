"""How soon a prompt's first token comes when its KV is computed, in the pool, or fetched from a tier after a restart.

    python benchmarks/kv_tiers.py --tier disk:/var/tmp/kv --tier valkey://127.0.0.1:6379 [--json FILE]

Every row is the median over some prompts of random tokens, one request at a time, in this process, without HTTP. Every
answer is held to the bits that it had when it was computed without a tier.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.types import Completion, SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=5)
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds to the first token, and how many of the prompt's tokens need not be computed."""

    tier: str
    how: str
    median_ms: float
    cached_tokens: int


class Asker:
    """Asks an engine for the first token of each prompt, and holds the answers to those known."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts
        self._known: list[Completion] = []

    def ask(self, engine: Engine, tier: str, how: str) -> Row:
        seconds, answers = list[float](), list[Completion]()
        for prompt in self._prompts:
            started = time.perf_counter()
            answers += engine.generate([prompt], ONE_TOKEN)
            seconds.append(time.perf_counter() - started)
        self._known = self._known or answers
        for answer, known in zip(answers, self._known, strict=True):
            assert (answer.token_ids, answer.logprobs) == (known.token_ids, known.logprobs), f"{tier}: other bits"
        return Row(tier, how, 1000 * statistics.median(seconds), answers[0].num_cached_tokens)


@contextmanager
def running(config: EngineConfig) -> Iterator[Engine]:
    """An engine that has run a step."""
    with Engine.load(config) as engine:
        engine.generate([[1, 2, 3]], ONE_TOKEN)
        yield engine


def measure_without(config: EngineConfig, asker: Asker) -> list[Row]:
    with running(config) as engine:
        return [asker.ask(engine, "", "computed"), asker.ask(engine, "", "in the pool")]


def measure(tier: str, config: EngineConfig, asker: Asker) -> list[Row]:
    """Write all prompts' KV to a tier, and fetch it by another engine: at first, and when its pool has been used."""
    with running(config) as engine:
        rows = [asker.ask(engine, tier, "computed, and written on the way")]
    with running(config) as engine:
        rows.append(asker.ask(engine, tier, "fetched by a new engine"))
        again = list[Row]()
        for _ in range(REPEATS):
            engine.reset_prefix_cache()
            again.append(asker.ask(engine, tier, "fetched again, the pool emptied"))
        rows.append(sorted(again, key=lambda row: row.median_ms)[REPEATS // 2])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tier", action="append", required=True, help="as caudex serve --kv-tier; may be repeated")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random()  # No tier may know the prompts of an earlier run.
    asker = Asker([[rng.randrange(256, 30_000) for _ in range(options.tokens)] for _ in range(options.prompts)])
    num_blocks = (options.prompts + 1) * (options.tokens // 16 + 2)
    rows = measure_without(EngineConfig(options.model, num_blocks=num_blocks), asker)
    for tier in options.tier:
        rows += measure(tier, EngineConfig(options.model, num_blocks=num_blocks, kv_tiers=(tier,)), asker)
    table = Table("tier", "", "first token, ms", "tokens not computed")
    for row in rows:
        table.add_row(row.tier.partition(":")[0], row.how, f"{row.median_ms:.0f}", str(row.cached_tokens))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
