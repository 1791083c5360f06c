"""How long a live server takes for what: the measurements that `caudex simulate --fit` fits its cost model to."""

from __future__ import annotations

import asyncio
import math
import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from caudex.bench.client import Endpoint, Record, ServerError, measure
from caudex.simulate import Measurement

SHORT_LENGTHS = (16, 48, 128, 256)
LONG_LENGTHS = (512, 1_024, 2_048, 4_096, 8_192)
"""Words of the prompts, as far as the server takes them and time allows."""

REPEATS = 3
TAIL_WORDS = (0, 12, 48, 160)
BATCHES = (1, 2, 4, 8, 16)
BATCH_WORDS = (48, 256)
SHARED_WORDS = 256
DECODE_TOKENS = 32

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(slots=True)
class StepMeter:
    """Measures a server that has nothing else to do; within about `budget` seconds, whatever its speed.

    Cold prompts of growing length, one token out: the time to the first token is all prefill. The same prompts again,
    some with a tail: most of it is then what comes before the engine, and the length of the context. The same prompts
    at once, with more tokens out, and batches of short ones and of such as share their beginning: the gaps between
    tokens are steps of decoding, with much context, with many requests, with context that many read. Each is the median
    of a few requests'; times have the connection's in them, as a client sees them. Batches come before the long
    prompts, which take what is left of the time.

    `chunk_tokens` is the most that the server computes in one step (`max_num_batched_tokens`).
    """

    endpoint: Endpoint
    chunk_tokens: int
    budget: float = 45.0
    on_progress: Callable[[float], None] = lambda share: None
    found: list[Measurement] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(time.time_ns()))
    _began: float = field(default_factory=time.perf_counter)

    async def run(self) -> list[Measurement]:
        """All measurements. ServerError if the server refuses even the shortest prompt."""
        if await self._measure_lengths(SHORT_LENGTHS):
            await self._measure_batches()
            await self._measure_lengths(LONG_LENGTHS)
        self.on_progress(1.0)
        return self.found

    async def _measure_lengths(self, lengths: tuple[int, ...]) -> bool:
        """False if the server does not take the longer ones, or time is short."""
        for words in lengths:
            prompts = [self._prompt(words) for _ in range(REPEATS)]
            if not self._may_take(REPEATS * self._expected(words) * 1.3) or not await self._prefill(prompts):
                return False
            await self._decode(prompts)
        return True

    async def _measure_batches(self) -> None:
        for words in BATCH_WORDS:
            prompts: list[str] = []
            for batch in BATCHES:
                new = [self._prompt(words) for _ in range(batch - len(prompts))]
                if not self._may_take(len(new) * self._expected(words) * 1.3):
                    break
                for prompt in new:
                    await self._ask(prompt, 1)
                prompts += new
                await self._decode(prompts)
        if self._may_take(self._expected(SHARED_WORDS) * 1.3):
            await self._measure_shared_context()

    async def _measure_shared_context(self) -> None:
        stem = self._prompt(SHARED_WORDS)
        shared = (await self._ask(stem, 1)).prompt_tokens or 0
        prompts = [f"{stem} {self._words(BATCH_WORDS[0])}" for _ in range(BATCHES[-1])]
        for prompt in prompts:
            await self._ask(prompt, 1)
        for batch in BATCHES[2:]:
            await self._decode(prompts[:batch], shared)

    async def _prefill(self, prompts: list[str]) -> bool:
        """Measures prompts of one length; False if the server does not take them."""
        cold = [await self._ask(prompt, 1) for prompt in prompts]
        if any(record.error for record in cold):
            if not self.found:
                raise ServerError(f"{self.endpoint.url} refused {prompts[0][:60]!r}: {cold[0].error}")
            return False
        self._note_prefill(cold)
        for tail in TAIL_WORDS:
            warm = [await self._ask(f"{prompt} {self._words(tail)}".rstrip(), 1) for prompt in prompts]
            if not any(record.error for record in warm):
                self._note_prefill(warm)
        return True

    async def _decode(self, prompts: list[str], shared_tokens: int = 0) -> None:
        """Measures a batch of prompts that are cached, of which so many tokens are the same."""
        batch = len(prompts)
        records = await asyncio.gather(*(self._ask(prompt, DECODE_TOKENS) for prompt in prompts))
        # A token without text, as special ones are, is no event: only those with an event a token tell a step's time.
        whole = [record for record in records if not record.error and len(record.gaps) >= DECODE_TOKENS - 2]
        if not whole:
            return
        context = sum(record.prompt_tokens or 0 for record in records) + batch * DECODE_TOKENS / 2
        distinct = context - (batch - 1) * shared_tokens
        step = Measurement(
            seconds=decode_seconds(whole), steps=1, decodes=batch, context_tokens=context, distinct_tokens=distinct
        )
        self._note(step)

    def _note_prefill(self, records: list[Record]) -> None:
        prompt = round(statistics.median(record.prompt_tokens or 0 for record in records))
        cached = round(statistics.median(record.cached_tokens or 0 for record in records))
        new = prompt - cached
        self._note(
            Measurement(
                seconds=statistics.median(record.ttft for record in records),
                steps=math.ceil(new / self.chunk_tokens),
                prefill_tokens=new,
                prefill_pairs=new * (cached + (new + 1) / 2),
                requests=1,
                prompt_tokens=prompt,
            )
        )

    def _note(self, measurement: Measurement) -> None:
        self.found.append(measurement)
        self.on_progress(min(1.0, (time.perf_counter() - self._began) / self.budget))

    def _expected(self, words: int) -> float:
        """Seconds that a cold prompt of so many words should take, by those measured so far."""
        cold = [m for m in self.found if m.requests and m.prefill_tokens > 0.9 * m.prompt_tokens]
        longer = [m.seconds for m in cold if m.prompt_tokens >= words]
        if longer:
            return min(longer)
        return cold[-1].seconds * words / cold[-1].prompt_tokens if cold else 0.0

    def _may_take(self, seconds: float) -> bool:
        return time.perf_counter() - self._began + seconds < self.budget

    def _prompt(self, words: int) -> str:
        """A prompt whose first word is its own, so that nothing of it is cached."""
        return f"{self._rng.getrandbits(64):x} {self._words(words)}"

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=count))

    async def _ask(self, prompt: str, max_tokens: int) -> Record:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        record, _ = await measure(self.endpoint, "/v1/completions", body, first=True)
        return record


def decode_seconds(records: list[Record]) -> float:
    """What a step took in which all of a batch decoded: of each request the mean of its gaps in the middle, when all
    run and none has finished. A mean, since tokens that are read late are read together, with no gap between them."""
    middle = slice(DECODE_TOKENS // 3, DECODE_TOKENS * 2 // 3)
    return statistics.median(statistics.fmean(record.gaps[middle]) for record in records)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server's metrics tell of its limits; None where they do not."""

    capacity_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


def server_limits(metrics: str) -> ServerLimits:
    """Reads `cache_config_info`, as vLLM and Caudex have it, from a page of Prometheus metrics."""
    line = next((line for line in metrics.splitlines() if "cache_config_info{" in line), "")
    labels = dict(re.findall(r'(\w+)="(\d+)"', line))

    def number(name: str) -> int | None:
        return int(labels[name]) if name in labels else None

    blocks, block_size = number("num_gpu_blocks"), number("block_size")
    capacity = blocks * block_size if blocks and block_size else None
    return ServerLimits(capacity, number("max_num_seqs"), number("max_num_batched_tokens"))
