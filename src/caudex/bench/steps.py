"""How long the steps of a live server take: what `caudex simulate --fit` is fitted to."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable
from typing import Any

from caudex.bench.client import Endpoint, Record, ServerError, measure

PREFILL_WORDS = (32, 128, 256, 512, 1_024, 1_536)
DECODE_BATCHES = (1, 2, 4, 8)
DECODE_WORDS = (32, 256)
DECODE_TOKENS = 24
REPEATS = 3

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


async def measure_steps(endpoint: Endpoint, progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
    """Steps as `caudex.simulate.read_fit` reads them, each the median of a few.

    Prefill: cold prompts of several lengths, alone, one token out; the step is the time to the first token, so it has
    the connection's and the tokenizer's time in it. Decode: several requests at once, the step is the gap between
    tokens. ServerError if the server refuses even the shortest; longer ones than it takes are left out.
    """
    rng = random.Random(0)
    total = len(PREFILL_WORDS) + len(DECODE_BATCHES) * len(DECODE_WORDS)
    steps: list[dict[str, Any]] = []
    for words in PREFILL_WORDS:
        records = [await _ask(endpoint, rng, words, 1) for _ in range(REPEATS)]
        if all(record.error is None for record in records):
            steps.append(_prefill_step(records))
        elif not steps:
            raise ServerError(f"{endpoint.url} refused a prompt of {words} words: {records[0].error}")
        progress(len(steps), total)
    for words in DECODE_WORDS:
        for batch in DECODE_BATCHES:
            records = await asyncio.gather(*[_ask(endpoint, rng, words, DECODE_TOKENS) for _ in range(batch)])
            if all(record.error is None and record.gaps for record in records):
                steps.append(_decode_step(records))
            progress(len(steps), total)
    return steps


async def _ask(endpoint: Endpoint, rng: random.Random, words: int, max_tokens: int) -> Record:
    """One request whose first word is its own, so that nothing of it is cached."""
    prompt = f"{rng.getrandbits(64):x} " + " ".join(rng.choices(_WORDS, k=words))
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    record, _ = await measure(endpoint, "/v1/completions", body, first=True)
    return record


def _prefill_step(records: list[Record]) -> dict[str, Any]:
    tokens = round(statistics.median(record.prompt_tokens or 0 for record in records))
    return {
        "seconds": statistics.median(record.ttft for record in records),
        "prefill_tokens": tokens,
        "prefill_pairs": tokens * (tokens + 1) / 2,
    }


def _decode_step(records: list[Record]) -> dict[str, Any]:
    context = sum((record.prompt_tokens or 0) + DECODE_TOKENS // 2 for record in records)
    return {
        "seconds": statistics.median(gap for record in records for gap in record.gaps[2:]),
        "decodes": len(records),
        "context_tokens": float(context),
    }
