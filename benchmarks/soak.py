"""A long run of random traffic through one engine: nothing leaks, nothing changes, nothing dies.

    python benchmarks/soak.py --minutes 30 [--model MODEL] [--num-blocks 120] [--weights int8]

Requests arrive in bursts, share prefixes, are cancelled, preempt each other in a pool far too small, and come back.
Each case (prompt, seed) must give the same tokens and log-probabilities, to the bit, every time it is served; the pool
must be all free or cached whenever the engine is idle; and resident memory must not grow once every case has been seen.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from caudex.engine.config import EngineConfig, KvCacheDTypeName, WeightsName
from caudex.engine.engine import Engine
from caudex.engine.types import GenerationRequest, RequestOutput, SamplingParams

NUM_CASES = 60
BURST_SIZE = 24


@dataclass
class Case:
    """A prompt and how it is sampled; `bits` is what it gave the first time it was served to its end."""

    prompt: list[int]
    sampling: SamplingParams
    bits: list[object] | None = None


@dataclass
class Served:
    """One submission of a case."""

    case: Case
    outputs: list[RequestOutput] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, output: RequestOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.done.set()

    def check(self) -> str:
        """The finish reason, once the outputs are found to be what they were before."""
        self.done.wait()
        last = self.outputs[-1]
        assert last.finish_reason in ("length", "abort"), last
        bits: list[object] = [(output.token_ids, output.logprobs) for output in self.outputs if output.token_ids]
        if self.case.bits is None and last.finish_reason == "length":
            self.case.bits = bits
        known = self.case.bits
        assert known is None or bits == known[: len(bits)], "a request gave other bits than before"
        return last.finish_reason


def make_cases(rng: random.Random, vocab_size: int, longest: int) -> list[Case]:
    """Prompts over a few stems of different lengths, sampled and greedy."""
    stems = [[rng.randrange(vocab_size) for _ in range(longest)] for _ in range(6)]
    cases = []
    for seed in range(NUM_CASES):
        prompt = rng.choice(stems)[: rng.randrange(1, longest)] + [rng.randrange(vocab_size)] * rng.randrange(1, 20)
        temperature = rng.choice([0.0, 1.0])
        sampling = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=rng.randrange(1, 60), ignore_eos=True, logprobs=1
        )
        cases.append(Case(prompt, sampling))
    return cases


def resident_megabytes() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def serve_burst(engine: Engine, rng: random.Random, cases: list[Case], serial: int) -> int:
    """Submit a burst with pauses and cancellations, and check all that comes back; the number cancelled."""
    served: dict[str, Served] = {}
    for index in range(BURST_SIZE):
        request_id = f"{serial}-{index}"
        served[request_id] = Served(rng.choice(cases))
        case = served[request_id].case
        engine.submit(GenerationRequest(request_id, case.prompt, case.sampling), served[request_id].take)
        if rng.random() < 0.2:
            engine.abort(rng.choice(list(served)))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.05)
    return sum(one.check() == "abort" for one in served.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model")
    parser.add_argument("--num-blocks", type=int, default=120)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--weights", choices=get_args(WeightsName), default="model")
    parser.add_argument("--kv-cache-dtype", choices=get_args(KvCacheDTypeName), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    config = EngineConfig(
        model=options.model,
        weights=options.weights,
        kv_cache_dtype=options.kv_cache_dtype,
        num_blocks=options.num_blocks,
        num_threads=options.num_threads,
        max_num_seqs=8,
        debug=True,
    )
    with Engine.load(config) as engine:
        cases = make_cases(rng, engine.tokenizer.vocab_size, min(900, engine.max_model_len - 100))
        table = Table("minutes", "requests", "cancelled", "preempted", "hit rate", "resident MB")
        started, last_row, bursts, cancelled = time.monotonic(), 0.0, 0, 0
        while time.monotonic() - started < options.minutes * 60:
            cancelled += serve_burst(engine, rng, cases, bursts)
            bursts += 1
            assert engine.is_alive, engine.error
            minutes = (time.monotonic() - started) / 60
            if minutes - last_row >= options.minutes / 10:
                last_row = minutes
                stats = engine.stats()
                hit_rate = stats.prefix_cache_hits / stats.prefix_cache_queries
                row = (f"{minutes:.1f}", bursts * BURST_SIZE, cancelled, stats.preemptions, f"{hit_rate:.1%}")
                table.add_row(*map(str, row), f"{resident_megabytes():.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
