"""What the prefix cache costs, call by call, through its Python face, on one thread.

    python benchmarks/cache.py                  # a table
    python benchmarks/cache.py --json FILE      # the same as JSON
    python benchmarks/cache.py --only requests,decode
    python benchmarks/cache.py --vllm-python PATH --sglang-python PATH      # the peers on the same inputs, side by side

Times are medians in microseconds (the mean of a batch for calls below one); run it under `taskset -c 0`, and on a busy
machine compare ratios. Prompts are trees of shared prefixes, 2,000 tokens, in a pool that is full, so every request
evicts.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_peers import PEERS, measure, print_table
from caudex import _core
from caudex.cache import PrefixCache, Sequence

Prompt = NDArray[np.int32]
Figures = dict[str, float]
clock = time.perf_counter

SYSTEM, TEMPLATE, SESSION, TAIL = 400, 600, 600, 400
NUM_BLOCKS, RUNNING = 20_000, 32


def tree_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Three levels of shared prefixes, drawn by Zipf: 8 systems, 16 templates each, 32 sessions each, and a tail."""
    rng = np.random.default_rng(seed)
    shared: dict[tuple[int, ...], Prompt] = {}

    def pick(n: int) -> int:
        weights = 1 / np.arange(1, n + 1)
        return int(rng.choice(n, p=weights / weights.sum()))

    def segment(key: tuple[int, ...], length: int) -> Prompt:
        if key not in shared:
            shared[key] = rng.integers(1, 50_000, length, dtype=np.int32)
        return shared[key]

    prompts = []
    for _ in range(count):
        s, t, c = pick(8), pick(16), pick(32)
        tail = rng.integers(1, 50_000, TAIL, dtype=np.int32)
        parts = segment((s,), SYSTEM), segment((s, t), TEMPLATE), segment((s, t, c), SESSION), tail
        prompts.append(np.concatenate(parts))
    return prompts


def median_us(times: Iterable[float]) -> float:
    return statistics.median(times) * 1e6


def finish(cache: PrefixCache, prompt: Prompt) -> None:
    seq = cache.begin(prompt)
    seq.allocate(len(prompt))
    seq.commit(len(prompt))
    seq.release()


def requests(index: str, policy: str = "lru", *, num_blocks: int = NUM_BLOCKS, running: int = RUNNING) -> Figures:
    """The calls of a request, while 32 others run."""
    cache = PrefixCache(num_blocks, index=index, policy=policy)  # type: ignore[arg-type]
    times: dict[str, list[float]] = {name: [] for name in ("match", "begin", "allocate", "commit", "release", "whole")}
    live: list[Sequence] = []
    for prompt in tree_prompts(4000):
        t0 = clock()
        cache.match(prompt)
        t1 = clock()
        seq = cache.begin(prompt)
        t2 = clock()
        seq.allocate(len(prompt))
        t3 = clock()
        seq.commit(len(prompt))
        t4 = clock()
        live.append(seq)
        if len(live) <= running:
            continue
        t5 = clock()
        live.pop(0).release()
        t6 = clock()
        for name, spent in zip(times, (t1 - t0, t2 - t1, t3 - t2, t4 - t3, t6 - t5, t4 - t1 + t6 - t5), strict=True):
            times[name].append(spent)
    stats = cache.stats()
    figures = {f"{name}_us": median_us(spent[len(spent) // 4 :]) for name, spent in times.items()}
    figures["whole_p99_us"] = float(np.percentile(times["whole"][1000:], 99)) * 1e6
    figures["hit_rate"] = (stats.hit_whole_tokens + stats.hit_partial_tokens) / stats.lookup_tokens
    figures["bytes_per_token"] = cache.num_bytes / (num_blocks * cache.block_size)
    return figures


def decode(index: str) -> Figures:
    """One token for each of 256 running sequences: commit the last one, append the next, take a slot."""
    batch, steps = 256, 512
    cache = PrefixCache(batch * 64, index=index, policy="lru")  # type: ignore[arg-type]
    seqs = [cache.begin(prompt[:100]) for prompt in tree_prompts(batch)]
    for seq in seqs:
        seq.allocate(100)
    tokens = np.arange(batch, dtype=np.int32)
    times = []
    for _ in range(steps):
        t0 = clock()
        cache.commit_all(seqs)
        cache.append_and_allocate(seqs, tokens)
        times.append((clock() - t0) / batch)
    return {"token_us": median_us(times)}


def waiting(index: str) -> Figures:
    """512 waiting prompts looked up in one call, as a scheduler orders its queue."""
    cache = PrefixCache(60_000, index=index, policy="lru")  # type: ignore[arg-type]
    prompts = tree_prompts(2000)
    for prompt in prompts:
        finish(cache, prompt)
    queue = prompts[-512:]
    times = []
    for _ in range(20):
        t0 = clock()
        cache.count_cached(queue)
        times.append(clock() - t0)
    return {"queue_of_512_ms": median_us(times) / 1e3}


def leaves(index: str, count: int) -> Figures:
    """Requests of two blocks in a tree of so many leaves below one node: what match and eviction cost then."""
    num_blocks = 2 * count + 64
    cache = PrefixCache(num_blocks, index=index, policy="lru")  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 50_000, (count + 4000, 32), dtype=np.int32)
    for prompt in prompts[:count]:
        finish(cache, prompt)
    return time_calls(cache, prompts[count:], prompts[rng.integers(count // 2, count, 4000)])


def blocks(index: str, num_blocks: int) -> Figures:
    """Requests of 2,000 tokens in a full pool of so many blocks."""
    cache = PrefixCache(num_blocks, index=index, policy="lru")  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    base = rng.integers(1, 50_000, 2000, dtype=np.int32)
    prompt = base.copy()
    for i in range(num_blocks // 125 + 1):
        prompt[0], prompt[1] = i % 49_999 + 1, i // 49_999 + 1
        finish(cache, prompt)
    fresh = [np.concatenate((np.array([7, 60_000 + i], np.int32), base[2:])) for i in range(1000)]
    known = []
    for i in rng.integers(num_blocks // 500, num_blocks // 250, 1000):
        prompt[0], prompt[1] = (i * 2) % 49_999 + 1, (i * 2) // 49_999 + 1
        known.append(prompt.copy())
    return time_calls(cache, fresh, known)


def time_calls(cache: PrefixCache, fresh: Any, known: Any) -> Figures:
    match, whole = [], []
    for prompt in known:
        t0 = clock()
        cache.match(prompt)
        match.append(clock() - t0)
    for prompt in fresh:
        t0 = clock()
        finish(cache, prompt)
        whole.append(clock() - t0)
    return {
        "match_us": median_us(match),
        "whole_us": median_us(whole),
        "whole_p99_us": float(np.percentile(whole, 99)) * 1e6,
        "bytes_per_token": cache.num_bytes / (cache.num_blocks * cache.block_size),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def hashes() -> Figures:
    """What the hash index pays for each algorithm, a token, when a prompt is committed."""
    figures = {}
    for name in _core.hasher_names():
        cache = PrefixCache(4096, index="hash", hash=name)
        prompt = np.arange(1, 32_001, dtype=np.int32)
        times = []
        for i in range(20):
            prompt[0] = i + 1
            seq = cache.begin(prompt)
            seq.allocate(len(prompt))
            t0 = clock()
            seq.commit(len(prompt))
            times.append((clock() - t0) / len(prompt))
            seq.release()
        figures[f"{name}_ns_per_token"] = median_us(times) * 1e3
    return figures


BENCHES: dict[str, Callable[[], dict[str, Figures]]] = {
    "requests": lambda: {
        "radix": requests("radix"),
        "hash": requests("hash"),
        "radix, gittins": requests("radix", "gittins"),  # the default policy; the peers have LRU
    },
    "decode": lambda: {index: decode(index) for index in ("radix", "hash")},
    "waiting": lambda: {index: waiting(index) for index in ("radix", "hash")},
    "leaves": lambda: {f"{n:,} leaves": leaves("radix", n) for n in (1_000, 100_000, 1_000_000)},
    "blocks": lambda: {f"{n:,} blocks": blocks("radix", n) for n in (10_000, 1_000_000, 10_000_000)},
    "hashes": lambda: {"commit": hashes()},
}


def side_by_side(benches: dict[str, dict[str, Figures]]) -> dict[str, Figures]:
    """Collect what the peers are compared with, by cache; the default one first."""
    cases = {"radix, gittins": "radix", "radix": "radix", "hash": "hash"}
    found = {}
    for case, index in cases.items():
        found[case] = dict(benches.get("requests", {}).get(case, {}))
        for name in ("decode", "waiting"):
            found[case] |= benches.get(name, {}).get(index, {})
    return {case: figures for case, figures in found.items() if figures}


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of the prefix cache")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--only", default=",".join(BENCHES), help="some of " + ", ".join(BENCHES))
    for key, peer in PEERS.items():
        parser.add_argument(f"--{key}-python", type=Path, help=f"an interpreter with {peer.name} ({peer.install})")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "benches": {}}
    for name in options.only.split(","):
        report["benches"][name] = BENCHES[name]()
        for case, figures in report["benches"][name].items():
            print(f"{name:>9} {case:18}", "  ".join(f"{key} {value:.3g}" for key, value in figures.items()), flush=True)
    report["peers"] = peers = {}
    for key, peer in PEERS.items():
        python = getattr(options, f"{key}_python")
        if python is None:
            print(f"{peer.name} was not measured: {peer.install} in an environment, and give its --{key}-python")
        else:
            peers[key] = measure(peer, python, tree_prompts(4000), NUM_BLOCKS, RUNNING)
    if ours := side_by_side(report["benches"]):
        print_table(ours, peers)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
