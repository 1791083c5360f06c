"""The text of the scenes: real, licensed, never the same twice."""

from __future__ import annotations

import random
from itertools import pairwise, takewhile

import pytest

from caudex.bench.corpus import CHARACTERS_A_TOKEN, Writer, fit, load_corpus


def writer(seed: object) -> Writer:
    return Writer(random.Random(str(seed)))


def test_the_excerpt_names_its_source_and_licence() -> None:
    corpus = load_corpus()
    assert "tau-bench" in corpus.source
    assert corpus.licence.startswith("MIT License, Copyright")
    assert len(corpus.messages) == len(set(corpus.messages)) > 500


@pytest.mark.parametrize("write", [Writer.system, lambda self: self.document(300), Writer.question])
def test_two_repeats_part_within_a_few_tokens(write) -> None:
    texts = [write(writer(seed)) for seed in range(20)]
    for one, other in pairwise(sorted(texts)):
        shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        assert len(shared) < 8 * CHARACTERS_A_TOKEN


def test_a_seed_writes_the_same_text_again() -> None:
    assert writer(1).document(500) == writer(1).document(500)


@pytest.mark.parametrize("num_tokens", [1, 50, 1500, 6000])
def test_a_document_is_about_as_long_as_asked_for(num_tokens: int) -> None:
    length = len(writer(1).document(num_tokens)) / CHARACTERS_A_TOKEN
    assert num_tokens * 0.9 - 10 <= length <= num_tokens


def test_fit_cuts_between_words() -> None:
    assert fit("one two three", 2) == "one two"
    assert fit("one two", 100) == "one two"
