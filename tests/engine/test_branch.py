"""Branches share what they have in common, and a whole completion is the sum of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from caudex.engine.branch import Branch, generate_branches
from caudex.engine.engine import Engine
from caudex.engine.types import GenerationError, SamplingParams

from .harness import greedy, running_engine, submit

PROMPT = list(b"The trunk of a tree, from which all branches grow")


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with running_engine(model=str(tiny_model("llama")), num_blocks=128) as engine:
        yield engine


def test_every_node_of_a_tree_is_computed_once(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.5, max_tokens=10, ignore_eos=True, logprobs=0)
    level = [Branch(engine, PROMPT)]
    computed = 0
    for _ in range(3):
        level = [branch.fork() for branch in level for _ in range(3)]
        completions = generate_branches(level, sampling)
        computed += sum(c.num_prompt_tokens - c.num_cached_tokens for c in completions)
    assert len({tuple(branch.token_ids) for branch in level}) == 27
    assert all(len(branch.token_ids) == len(PROMPT) + 30 for branch in level)
    assert computed <= len(PROMPT) + 3 * (1 + 3 + 9), "the trunk once, and of each node its last token for each child"


def test_a_branch_adds_up_its_logprobs_and_takes_text(engine: Engine) -> None:
    branch = Branch(engine, PROMPT)
    first = branch.generate(greedy(4, logprobs=0))
    branch.append(" and")
    second = branch.generate(greedy(4, logprobs=0))
    assert branch.token_ids == [*PROMPT, *first.token_ids, *engine.tokenizer.encode(" and"), *second.token_ids]
    assert branch.logprob == pytest.approx(sum(token.logprob for c in (first, second) for token in c.logprobs))
    assert branch.fork().logprob == branch.logprob


def test_generate_takes_text_and_tokens(engine: Engine) -> None:
    text = "The trunk of a tree"
    token_ids = engine.tokenizer.encode(text)
    expected = submit(engine, token_ids, greedy(6)).wait()
    for completion in engine.generate([token_ids, text], greedy(6)):
        assert completion.token_ids == expected.tokens
        assert completion.text == expected.text
        assert completion.finish_reason == "length"


def test_generate_raises_when_its_request_is_lost(tiny_model: Callable[[str], Path]) -> None:
    with running_engine(model=str(tiny_model("llama")), num_blocks=128) as engine:
        engine._loop._runner.run = None  # type: ignore[method-assign, assignment]
        with pytest.raises(GenerationError, match="TypeError"):
            engine.generate([PROMPT], greedy(3))
