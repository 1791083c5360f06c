"""vLLM's KV cache manager on the inputs of benchmarks/cache.py, which runs this with vLLM's own interpreter.

    python vllm_manager.py PROMPTS.npy --blocks 20000 --running 32

Prints one line of JSON: medians in microseconds, over the second half of the prompts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import tracemalloc
from collections import deque
from importlib.metadata import packages_distributions, version
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK = 16
clock = time.perf_counter


class Manager:
    """A pool without a model, driven as the scheduler drives it."""

    def __init__(self, num_blocks: int) -> None:
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK, hash_fn)
        self.sampling = SamplingParams(max_tokens=1024)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.manager = KVCacheManager(
            config, max_model_len=8192, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
        )
        self.num_requests = 0

    def request(self, tokens: list[int]) -> Any:
        """Return a request whose blocks have not been hashed."""
        self.num_requests += 1
        return Request(
            request_id=str(self.num_requests),
            prompt_token_ids=tokens,
            sampling_params=self.sampling,
            pooling_params=None,
            block_hasher=None,
        )

    def hash(self, request: Any) -> None:
        request._block_hasher = self.hasher
        request.update_block_hashes()

    def allocate(self, request: Any, blocks: Any, hit: int) -> None:
        assert self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is not None
        request.num_computed_tokens = request.num_tokens

    def decode(self, request: Any) -> None:
        request.append_output_token_ids(7)
        assert self.manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1


def time_requests(num_blocks: int, running: int, prompts: list[list[int]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ("hash", "match", "allocate", "release", "whole")}
    pool = Manager(num_blocks)
    live: deque[Any] = deque()
    hits = looked_up = 0
    for i, tokens in enumerate(prompts):
        request = pool.request(tokens)
        t0 = clock()
        pool.hash(request)
        t1 = clock()
        blocks, hit, _ = pool.manager.get_computed_blocks(request)
        t2 = clock()
        pool.allocate(request, blocks, hit)
        t3 = clock()
        live.append(request)
        t4 = t5 = clock()
        if len(live) > running:
            oldest = live.popleft()
            t4 = clock()
            pool.manager.free(oldest)
            t5 = clock()
        if i < len(prompts) // 2:
            continue
        hits += hit
        looked_up += len(tokens)
        for name, spent in zip(times, (t1 - t0, t2 - t1, t3 - t2, t5 - t4, t3 - t0 + t5 - t4), strict=True):
            times[name].append(spent)
    figures = {f"{name}_us": statistics.median(spent) * 1e6 for name, spent in times.items()}
    figures["hit_rate"] = hits / looked_up
    return figures


def measure_memory(num_blocks: int, prompts: list[list[int]]) -> float:
    """Bytes a token of a full pool, all of it in Python objects."""
    tracemalloc.start()
    pool = Manager(num_blocks)
    for tokens in prompts[: len(prompts) // 2]:
        request = pool.request(tokens)
        pool.hash(request)
        blocks, hit, _ = pool.manager.get_computed_blocks(request)
        pool.allocate(request, blocks, hit)
        pool.manager.free(request)
    del request, blocks
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / (num_blocks * BLOCK)


def time_decode(prompts: list[list[int]]) -> float:
    batch, steps = 256, 512
    pool = Manager(batch * 64)
    requests = []
    for tokens in prompts[:batch]:
        request = pool.request(tokens[:100])
        pool.hash(request)
        blocks, hit, _ = pool.manager.get_computed_blocks(request)
        pool.allocate(request, blocks, hit)
        requests.append(request)
    times = []
    for _ in range(steps):
        start = clock()
        for request in requests:
            pool.decode(request)
        times.append((clock() - start) / batch)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--running", type=int, required=True)
    options = parser.parse_args()
    prompts = np.load(options.prompts).tolist()
    figures: dict[str, Any] = {"version": version(packages_distributions()["vllm"][0])}
    figures |= time_requests(options.blocks, options.running, prompts)
    figures["token_us"] = time_decode(prompts)
    figures["bytes_per_token"] = measure_memory(options.blocks, prompts)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for what its libraries have started
