"""Texts are cut at the ends of passages that move, whatever stands between them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from caudex.analysis.breakers.unitigs import Cutter


def _passage(number: int, length: int) -> str:
    return "".join(chr(0x4E00 + 100 * number + position) for position in range(length))


@given(st.integers(0, 99), st.sampled_from(["", "\n\n", "; and then: "]))
def test_shuffled_passages_are_found_whole(seed: int, separator: str) -> None:
    rng = random.Random(seed)
    passages = [_passage(number, rng.randrange(12, 40)) for number in range(5)]
    texts = ["head " + separator.join(rng.sample(passages, 5)) + " rest" for _ in range(12)]
    cutter = Cutter(texts, k=6)
    inner = [piece for text in texts for piece in cutter.cut(text)]
    assert set(passages) <= set(inner)


@given(st.lists(st.text(max_size=30), min_size=1, max_size=6), st.integers(1, 8))
def test_the_pieces_are_the_text(texts: list[str], k: int) -> None:
    cutter = Cutter(texts, k)
    for text in texts:
        assert "".join(cutter.cut(text)) == text


def test_texts_that_agree_are_not_cut() -> None:
    assert Cutter(["one and the same text"] * 3, k=4).cut("one and the same text") == ["one and the same text"]
