"""One cache, several threads: every call is atomic, and long ones let the others run."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from caudex.cache import OutOfBlocks, PrefixCache


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_requests_from_many_threads(index: Any) -> None:
    cache = PrefixCache(400, block_size=4, index=index)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(150):
                prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 60))]
                seq = cache.begin(prompt)
                assert seq.num_cached_tokens < len(prompt)
                try:
                    seq.allocate(len(prompt) + 4)
                    seq.commit(len(prompt))
                    child = seq.fork()
                    child.release()
                    seq.append([1, 2])
                    seq.allocate(len(prompt) + 2)
                    seq.commit(len(prompt) + 2)
                except OutOfBlocks:
                    pass
                assert len(seq.block_table) * 4 >= seq.num_committed_tokens - 3
                cache.match(prompt)
                cache.explain(prompt)
                seq.release()
        except BaseException as error:
            failures.append(error)

    def watch() -> None:
        try:
            while any(thread.is_alive() for thread in workers):
                cache.check_invariants()
                cache.resize(random.choice([300, 400]))
                cache.compact()
                stats = cache.stats()
                assert stats.lookup_tokens == stats.hit_whole_tokens + stats.hit_partial_tokens + stats.missed_tokens
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in workers:
        thread.start()
    watcher = threading.Thread(target=watch)
    watcher.start()
    for thread in [*workers, watcher]:
        thread.join()
    assert not failures
    assert cache.num_pinned_blocks == 0
    assert cache.stats().requests == 600
    cache.check_invariants()


def test_a_long_call_lets_other_threads_run() -> None:
    """While one thread looks up a prompt of millions of tokens again and again, another one gets on."""
    cache = PrefixCache(1 << 18, block_size=16)
    prompt = np.arange(4_000_000, dtype=np.int32)
    seq = cache.begin(prompt)
    seq.allocate(len(prompt))
    seq.commit(len(prompt))
    inside, others = threading.Event(), []

    def look_up() -> None:
        for _ in range(20):
            inside.set()
            cache.match(prompt)
        others.append("done")

    thread = threading.Thread(target=look_up)
    thread.start()
    inside.wait()
    steps = 0
    while not others:
        steps += 1
    thread.join()
    assert steps > 20
