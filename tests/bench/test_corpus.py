"""The text of the scenes: real, licensed, never the same twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise, takewhile

import pytest
from tokenizers import Tokenizer

from caudex.bench.corpus import Writer, fit, load_corpus
from caudex.engine.loading import locate_checkpoint


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
        assert len(shared) < 32


def test_a_seed_writes_the_same_text_again() -> None:
    assert writer(1).document(500) == writer(1).document(500)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The default model's."""
    return Tokenizer.from_file(str(locate_checkpoint(None).directory / "tokenizer.json"))


@pytest.mark.parametrize("write", [Writer.system, Writer.document, Writer.examples])
@pytest.mark.parametrize("num_tokens", [64, 300, 1200])
def test_a_text_is_about_as_long_as_asked_for(
    tokenizer: Tokenizer, write: Callable[[Writer, int], str], num_tokens: int
) -> None:
    lengths = [len(tokenizer.encode(write(writer(seed), num_tokens)).ids) for seed in range(10)]
    assert abs(sum(lengths) / len(lengths) - num_tokens) < 30 + 0.05 * num_tokens


def test_fit_cuts_between_words() -> None:
    assert fit("one two three", 9) == "one two"
    assert fit("one two", 100) == "one two"
