"""Content that is not text: the same placeholders with another image never match."""

from __future__ import annotations

from typing import Any

import pytest

from caudex.cache import PrefixCache

PLACEHOLDER = 9
PROMPT = [1, 2, *[PLACEHOLDER] * 6, 3, 4, 5, 6]
Content = list[tuple[int, int, bytes]]

pytestmark = pytest.mark.parametrize("index", ["radix", "hash"])


def finish(cache: PrefixCache, tokens: list[int], content: Content | None) -> None:
    seq = cache.begin(tokens, content=content)
    seq.allocate(len(tokens))
    seq.commit(len(tokens))
    seq.release()
    cache.check_invariants()


def hit(cache: PrefixCache, tokens: list[int], content: Content | None) -> int:
    return cache.match([*tokens, 0], content=content).num_tokens


def test_another_image_does_not_match(index: Any) -> None:
    cache = PrefixCache(16, block_size=2, index=index)
    finish(cache, PROMPT, [(2, 8, b"cat")])
    assert hit(cache, PROMPT, [(2, 8, b"cat")]) == len(PROMPT)
    assert hit(cache, PROMPT, [(2, 8, b"dog")]) == 2
    assert hit(cache, PROMPT, None) == 2, "nor do bare placeholders"


def test_one_image_of_six_tokens_is_not_two_of_three(index: Any) -> None:
    cache = PrefixCache(16, block_size=2, index=index)
    finish(cache, PROMPT, [(2, 8, b"cat")])
    assert hit(cache, PROMPT, [(2, 5, b"cat"), (5, 8, b"cat")]) < 6


def test_forgotten_contents_are_bounded_by_the_pool(index: Any) -> None:
    cache = PrefixCache(8, block_size=2, index=index)
    for i in range(3000):
        finish(cache, PROMPT, [(2, 8, b"image %d" % i)])
    assert hit(cache, PROMPT, [(2, 8, b"image 2999")]) == len(PROMPT)
    assert hit(cache, PROMPT, [(2, 8, b"image 5")]) <= 2


@pytest.mark.parametrize("content", [[(3, 3, b"x")], [(5, 2, b"x")], [(0, 99, b"x")], [(4, 6, b"x"), (0, 2, b"y")]])
def test_ranges_must_make_sense(index: Any, content: Content) -> None:
    cache = PrefixCache(8, block_size=2, index=index)
    with pytest.raises(ValueError, match="content"):
        cache.begin(PROMPT, content=content)
    with pytest.raises(ValueError, match="content"):
        cache.match(PROMPT, content=content)
    assert cache.num_free_blocks == 8
