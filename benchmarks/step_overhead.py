"""What a step costs besides the model: scheduling, packing, sampling, detokenising, outputs.

    python benchmarks/step_overhead.py [--model MODEL] [--num-threads 1] [--json FILE]

Both are processor time of the engine's thread, which a busy neighbour disturbs less than the clock on the wall; with
one thread of kernels the model's share is all of its work.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from caudex.cache import PrefixCache
from caudex.engine.batch import Int32Array, StepBatch
from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.kv_memory import KvMemory
from caudex.engine.loading import ignore_progress, locate_checkpoint
from caudex.engine.model import load_model
from caudex.engine.runner import ModelRunner
from caudex.engine.runner_choice import make_runner
from caudex.engine.types import SamplingParams

NUM_BLOCKS = 1024


class TimedRunner(ModelRunner):
    """A runner that adds up the time its steps take, and the time between them."""

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.reset()

    @property
    def is_bit_stable(self) -> bool:
        return self._inner.is_bit_stable

    def reset(self) -> None:
        self.num_steps = 0
        self.model_seconds = 0.0
        self.other_seconds = 0.0
        self._left_at: float | None = None

    @property
    def kv_memory(self) -> KvMemory:
        return self._inner.kv_memory

    def copy_blocks(self, copies: Int32Array) -> None:
        self._inner.copy_blocks(copies)

    def run(self, batch: StepBatch) -> Tensor:
        entered = time.thread_time()
        if self._left_at is not None:
            self.other_seconds += entered - self._left_at
        logits = self._inner.run(batch)
        self._left_at = time.thread_time()
        self.model_seconds += self._left_at - entered
        self.num_steps += 1
        return logits


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds a step."""

    load: str
    steps: int
    model_ms: float
    other_ms: float

    @property
    def share(self) -> float:
        return self.other_ms / (self.model_ms + self.other_ms)


def load_engine(config: EngineConfig) -> tuple[Engine, TimedRunner]:
    """An engine whose runner is timed."""
    loaded = load_model(locate_checkpoint(config.model), config, ignore_progress)
    runner = TimedRunner(make_runner(loaded, config, NUM_BLOCKS, NUM_BLOCKS * config.block_size))
    engine = Engine(
        config,
        model_name=loaded.name,
        tokenizer=loaded.tokenizer,
        runner=runner,
        cache=PrefixCache(NUM_BLOCKS, config.block_size, index=config.index, policy=config.policy),
        vocab_size=loaded.vocab_size,
        max_model_len=min(loaded.position_limit or 4096, 4096),
        eos_token_ids=loaded.eos_token_ids,
    )
    return engine, runner


def measure(
    engine: Engine, runner: TimedRunner, load: str, prompts: list[list[int]], sampling: SamplingParams
) -> Overhead:
    runner.reset()
    engine.generate(prompts, sampling)
    steps = runner.num_steps
    return Overhead(load, steps, runner.model_seconds / steps * 1e3, runner.other_seconds / (steps - 1) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    engine, runner = load_engine(EngineConfig(model=options.model, num_threads=options.num_threads))

    def words(count: int) -> list[int]:
        return [rng.randrange(engine.tokenizer.vocab_size) for _ in range(count)]

    def params(**settings: float) -> SamplingParams:
        return SamplingParams(max_tokens=64, ignore_eos=True, **settings)  # type: ignore[arg-type]

    document = words(1000)
    loads = [
        ("decode, 1 at once", [words(64)], params(temperature=0.0)),
        ("decode, 8 at once", [words(64) for _ in range(8)], params(temperature=0.0)),
        ("8 at once, temperature", [words(64) for _ in range(8)], params(temperature=0.7)),
        ("8 at once, top-p", [words(64) for _ in range(8)], params(temperature=0.7, top_p=0.9)),
        ("8 at once, log-probabilities", [words(64) for _ in range(8)], params(temperature=0.0, logprobs=5)),
        ("8 questions on one document", [document + words(30) for _ in range(8)], params(temperature=0.0)),
    ]
    with engine:
        engine.generate([words(20)], params(temperature=0.0))
        rows = [measure(engine, runner, *load) for load in loads]
    table = Table("load", "steps", "model ms a step", "other ms a step", "other")
    for row in rows:
        table.add_row(row.load, str(row.steps), f"{row.model_ms:.2f}", f"{row.other_ms:.2f}", f"{row.share:.1%}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
