"""SGLang's radix cache on the inputs of benchmarks/cache.py, which runs this with SGLang's own interpreter.

    python sglang_tree.py PROMPTS.npy --blocks 20000 --running 32

Its Rust core, at a page size of 1, so that it matches to the token as Caudex does. Prints one line of JSON: medians in
microseconds, over the second half of the prompts; bytes are what the process grew by.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from array import array
from collections import deque
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

BLOCK = 16  # of the pool that it is compared with
clock = time.perf_counter


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Tree:
    """A pool without a model, driven as the scheduler drives it: insert what was computed, then hold it by a lock."""

    def __init__(self, num_tokens: int) -> None:
        self.slots = TokenToKVPoolAllocator(num_tokens, torch.float16, "cpu", None, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.slots,
            page_size=1,
            eviction_policy="lru",
            enable_kv_cache_events=False,
        )
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = "rust"
        self.cache = UnifiedRadixCache(params)

    def match(self, tokens: Any, limit: int) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, limit=limit)))

    def allocate(self, found: Any, count: int) -> Any:
        """Return the slots of the whole prompt: the cached ones and new ones, for which others may be evicted."""
        known = self.cache.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        wanted = count - found.device_prefix_len
        missing = wanted - self.slots.available_size()
        if missing > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=missing))
        return torch.cat((known, self.slots.alloc(wanted)))

    def insert(self, tokens: Any, slots: Any, found: Any) -> None:
        key = RadixKey(tokens)
        self.cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=found.device_prefix_len))

    def hold(self, found: Any) -> Any:
        return self.cache.lock(found.last_device_node)


def time_requests(num_tokens: int, running: int, prompts: list[Any]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ("match", "allocate", "commit", "release", "whole")}
    empty = resident_bytes()
    tree = Tree(num_tokens)
    live: deque[Any] = deque()
    hits = looked_up = 0
    for i, tokens in enumerate(prompts):
        t0 = clock()
        found = tree.match(tokens, len(tokens) - 1)
        t1 = clock()
        lock = tree.hold(found)
        slots = tree.allocate(found, len(tokens))
        t2 = clock()
        tree.insert(tokens, slots, found)
        whole = tree.match(tokens, len(tokens))
        held = tree.hold(whole)
        tree.cache.unlock(lock)
        t3 = clock()
        live.append(held)
        t4 = t5 = clock()
        if len(live) > running:
            oldest = live.popleft()
            t4 = clock()
            tree.cache.unlock(oldest)
            t5 = clock()
        if i < len(prompts) // 2:
            continue
        hits += found.device_prefix_len
        looked_up += len(tokens)
        for name, spent in zip(times, (t1 - t0, t2 - t1, t3 - t2, t5 - t4, t3 - t0 + t5 - t4), strict=True):
            times[name].append(spent)
    figures = {f"{name}_us": statistics.median(spent) * 1e6 for name, spent in times.items()}
    figures["hit_rate"] = hits / looked_up
    figures["bytes_per_token"] = (resident_bytes() - empty) / num_tokens
    return figures


def time_queue(prompts: list[Any]) -> float:
    """Look up 512 waiting prompts, as it orders its queue by the longest prefix."""
    tree = Tree(len(prompts) * 2000)
    for tokens in prompts[:2000]:
        found = tree.match(tokens, len(tokens) - 1)
        tree.insert(tokens, tree.allocate(found, len(tokens)), found)
    times = []
    for _ in range(20):
        start = clock()
        for tokens in prompts[1488:2000]:
            tree.match(tokens, len(tokens) - 1)
        times.append(clock() - start)
    return statistics.median(times) * 1e3


def time_decode() -> float:
    """A slot for each of 256 running requests; the tree takes no part until they end."""
    batch, steps = 256, 512
    tree = Tree(batch * steps)
    times = []
    for _ in range(steps):
        start = clock()
        tree.slots.alloc(batch)
        times.append((clock() - start) / batch)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--running", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = [array("q", tokens) for tokens in np.load(options.prompts).tolist()]
    figures: dict[str, Any] = {"version": version("sglang")}
    figures |= time_requests(options.blocks * BLOCK, options.running, prompts)
    figures["token_us"] = time_decode()
    figures["queue_of_512_ms"] = time_queue(prompts)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for what its libraries have started
