"""Every public method of every class of the cache, found by looking: odd calls raise, and the cache goes on working.

A method that is added tomorrow is called here without a line being written.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from caudex.cache import OutOfBlocks, PrefixCache, SessionHints

Parts = dict[str, Any]
"""A cache and what hangs on it, by a name for people."""

REFUSED = (ValueError, TypeError, OverflowError, OutOfBlocks, MemoryError)
HOSTILE: list[Any] = [
    None,
    -1,
    2**63,
    2**70,
    float("nan"),
    "",
    "nul\0",
    b"",
    b"CDXCACHE",
    [],
    [-1],
    [1, 2, 3],
    [None],
    [[1, 2], [3]],
    np.zeros((2, 2), np.int32),
    np.arange(9)[::-2],
    np.array([np.nan]),
    SessionHints(),
    object(),
]


def serve(cache: Any, tokens: list[int]) -> None:
    sequence = cache.begin(tokens)
    sequence.allocate(len(tokens))
    sequence.commit(len(tokens))
    sequence.release()


def make_own() -> Parts:
    cache = PrefixCache(16, block_size=4, sharing="public", manual_clock=True)
    serve(cache, [1, 2, 3, 4, 5])
    return {"cache": cache, "sequence": cache.begin([1, 2, 3, 4, 5, 6]), "pin": cache.pin([1, 2, 3, 4])}


def make_like_vllm() -> Parts:
    cache = PrefixCache.like_vllm(16, 4)
    serve(cache, [1, 2, 3, 4, 5])
    return {"cache": cache, "sequence": cache.begin([1, 2, 3, 4, 5, 6])}


def make_like_sglang() -> Parts:
    cache = PrefixCache.like_sglang(16, 4)
    serve(cache, [1, 2, 3, 4, 5])
    return {"cache": cache, "sequence": cache.begin([1, 2, 3, 4, 5, 6])}


MAKERS: list[Callable[[], Parts]] = [make_own, make_like_vllm, make_like_sglang]


def public_names(thing: Any) -> list[str]:
    return [name for name in dir(type(thing)) if not name.startswith("_")]


def is_method(thing: Any, name: str) -> bool:
    return callable(getattr(type(thing), name)) and not isinstance(getattr(type(thing), name), property)


def all_methods() -> Iterator[Any]:
    for make in MAKERS:
        for part, thing in make().items():
            for name in public_names(thing):
                if is_method(thing, name):
                    yield pytest.param(make, part, name, id=f"{make.__name__[5:]}-{part}-{name}")


def check_works(cache: Any) -> None:
    """It can be emptied and serves as before."""
    if hasattr(cache, "check_invariants"):
        cache.check_invariants()
    serve(cache, [7, 8, 9, 10, 11])
    sequence = cache.begin([7, 8, 9, 10, 12])
    assert sequence.num_cached_tokens == 4
    sequence.release()


@pytest.mark.parametrize(("make", "part", "name"), all_methods())
def test_every_method_survives_every_argument(make: Callable[[], Parts], part: str, name: str) -> None:
    parts = make()
    calls = [*itertools.product(HOSTILE, repeat=1), *itertools.product(HOSTILE, repeat=2), (), (1, 2, 3, 4)]
    for arguments in calls:
        try:
            result = getattr(parts[part], name)(*arguments)
        except REFUSED:
            continue
        del result  # a sequence or pin that came of it is released
        if name in ("release", "resize", "load"):
            parts = make()
    if name == "begin":
        gc.collect()
    for keyword in ("namespace", "tenant", "content", "hints", "tokens", "nonsense"):
        for value in HOSTILE:
            try:
                getattr(parts[part], name)(**{keyword: value})
            except REFUSED:
                continue
    check_works(parts["cache"])


@pytest.mark.parametrize("make", MAKERS)
def test_whatever_is_asked_of_a_released_handle_raises(make: Callable[[], Parts]) -> None:
    for part, handle in make().items():
        if part == "cache":
            continue
        handle.release()
        for name in public_names(handle):
            if name == "is_released":
                assert handle.is_released
                continue
            with pytest.raises(ValueError, match="released"):
                call_somehow(handle, name)


def call_somehow(thing: Any, name: str) -> None:
    """Call a method with arguments that its signature takes, or read a property."""
    member = getattr(thing, name)
    for arguments in ([], [1], [[1]], [SessionHints()]):
        try:
            member(*arguments)
        except TypeError:
            continue  # the next may fit
        return
    raise AssertionError(f"no arguments fit {name}")


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_that_holds_blocks_can_be_copied(make: Callable[[], Parts], clone: Callable[[Any], Any]) -> None:
    parts = make()
    for thing in parts.values():
        with pytest.raises(TypeError, match=f"cannot pickle '{type(thing).__name__}' object"):
            clone(thing)
    check_works(parts["cache"])


def test_every_class_can_be_made_in_no_other_way() -> None:
    """A handle comes from its cache: made by hand it would point nowhere."""
    for make in MAKERS:
        for part, thing in make().items():
            if part != "cache":
                with pytest.raises(TypeError):
                    type(thing)()
                assert not inspect.isabstract(type(thing))


# ------------------------------------------------------------------------------------------------ out of blocks


def full_cache() -> tuple[PrefixCache, Any]:
    """Eight blocks of which a running request holds all but one, which is cached."""
    cache = PrefixCache(8, block_size=4, pin_budget=1)
    serve(cache, [1, 2, 3, 4])
    running = cache.begin(list(range(10, 37)))
    running.allocate(27)
    running.commit(26)
    return cache, running


def fork_twice(cache: PrefixCache, running: Any) -> None:
    first = running.fork()  # takes the last block
    try:
        running.fork()
    finally:
        first.release()


OUT_OF_BLOCKS: dict[str, Callable[[PrefixCache, Any], Any]] = {
    "allocate": lambda cache, running: running.allocate(36),
    "allocate all at once": lambda cache, running: cache.begin(list(range(50, 90))).allocate(40),
    "append_and_allocate": lambda cache, running: cache.append_and_allocate(
        [cache.begin([40 + i, 1, 2]) for i in range(3)], [3, 3, 3]
    ),
    "fork": fork_twice,
    "pin": lambda cache, running: cache.pin(list(range(10, 20))),
    "resize": lambda cache, running: cache.resize(6),
}


@pytest.mark.parametrize("site", OUT_OF_BLOCKS)
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_out_of_blocks_changes_nothing(site: str, index: Any) -> None:
    cache, running = full_cache()

    def state() -> Any:
        gc.collect()
        cache.check_invariants()
        stats = cache.stats()
        table = running.block_table.tolist()
        return cache.num_blocks, cache.num_pinned_blocks, running.num_tokens, table, stats.committed_tokens

    before = state()
    with pytest.raises(OutOfBlocks, match=r"blocks|pinned"):
        OUT_OF_BLOCKS[site](cache, running)
    assert state() == before
    if site != "fork":  # whose first child needed the cached block
        assert cache.match([1, 2, 3, 4, 5]).num_tokens == 4
        assert cache.stats().evicted_blocks == 0
