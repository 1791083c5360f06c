"""Outputs that must follow a schema do, at any temperature, and are as free as it leaves them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from caudex.engine.engine import Engine
from caudex.engine.types import OutputGrammar, SamplingParams

from .harness import running_engine, submit

pytest.importorskip("llguidance")

PROMPT = list(b"Answer in JSON: ")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with running_engine(model=str(tiny_model("llama")), num_blocks=64) as engine:
        yield engine


def ask(engine: Engine, grammar: OutputGrammar, seed: int) -> str:
    params = SamplingParams(temperature=1.5, seed=seed, max_tokens=200, grammar=grammar)
    result = submit(engine, PROMPT, params).wait()
    assert result.last.finish_reason == "stop"
    return result.text


def test_a_schema_is_followed(engine: Engine) -> None:
    answers = [json.loads(ask(engine, OutputGrammar("json_schema", json.dumps(SCHEMA)), seed)) for seed in range(8)]
    for answer in answers:
        assert set(answer) == {"name", "age"}
        assert len(answer["name"]) <= 5
        assert 0 <= answer["age"] <= 99
    assert len({answer["name"] for answer in answers}) > 1


def test_a_pattern_a_choice_and_a_grammar_are_followed(engine: Engine) -> None:
    assert re.fullmatch(r"[0-9]{3}-[a-f]+!", ask(engine, OutputGrammar("regex", r"[0-9]{3}-[a-f]+!"), 1))
    choices = {ask(engine, OutputGrammar("choice", '["left", "right"]'), seed) for seed in range(12)}
    assert choices == {"left", "right"}
    assert ask(engine, OutputGrammar("lark", 'start: "a" "b"~3'), 1) == "abbb"


def test_what_is_no_grammar_is_refused_at_once(engine: Engine) -> None:
    for grammar in (OutputGrammar("json_schema", '{"type": "sausage"}'), OutputGrammar("regex", "(")):
        with pytest.raises(ValueError, match=f"the {grammar.kind} cannot be used"):
            submit(engine, PROMPT, SamplingParams(grammar=grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        OutputGrammar("json_schema", '{"$ref": "#"}'),
        OutputGrammar(
            "json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#"}}}'
        ),
        OutputGrammar("lark", "start: a\na: b\nb: a"),
    ],
)
def test_rules_that_lead_to_themselves_only_are_refused_at_once(engine: Engine, grammar: OutputGrammar) -> None:
    with pytest.raises(ValueError, match=f"the {grammar.kind} cannot be used: no text satisfies it"):
        submit(engine, PROMPT, SamplingParams(grammar=grammar))


def test_a_grammar_that_comes_to_a_dead_end_is_no_answer(engine: Engine) -> None:
    last = submit(engine, PROMPT, SamplingParams(grammar=OutputGrammar("lark", 'start: "a" a\na: b\nb: a'))).wait().last
    assert last.finish_reason == "error"
    assert "no text satisfies it from here" in (last.error or "")
    assert last.error_field == "grammar"


def test_the_empty_text_may_be_all_that_a_grammar_allows(engine: Engine) -> None:
    assert ask(engine, OutputGrammar("lark", 'start: ""'), 1) == ""


def test_requests_without_a_grammar_are_free_beside_one_with(engine: Engine) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    alone = submit(engine, PROMPT, free).wait().tokens
    bound = submit(engine, PROMPT, SamplingParams(max_tokens=30, grammar=OutputGrammar("regex", "a+")))
    assert submit(engine, PROMPT, free).wait().tokens == alone
    assert set(bound.wait().text) == {"a"}


def test_a_grammar_that_grows_beyond_all_limits_fails_its_request_alone(engine: Engine) -> None:
    free = submit(engine, PROMPT, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    last = submit(engine, PROMPT, SamplingParams(grammar=OutputGrammar("regex", "a{1000000}"))).wait().last
    assert last.finish_reason == "error"
    assert "grammar cannot be followed" in (last.error or "")
    assert last.error_field == "grammar"
    assert len(free.wait().tokens) == 30
    assert engine.stats().num_pinned_blocks == 0


def test_a_compiled_grammar_is_kept_and_starts_anew(engine: Engine) -> None:
    """Requests of one grammar follow it each from its beginning."""
    params = SamplingParams(grammar=OutputGrammar("choice", '["yes", "no"]'), max_tokens=9, temperature=5.0, seed=1)
    texts = [completion.text for completion in engine.sample([1], params, 20)]
    assert set(texts) == {"yes", "no"}


def test_rules_that_lead_thousands_deep_do_not_end_the_process() -> None:
    """llguidance recurses along them; run in a process of its own, which would die."""
    program = r"""
from caudex.engine.grammar import GrammarCompiler
from caudex.engine.types import OutputGrammar
from tests.conftest import byte_tokenizer

rules = "".join(f'a{i}:"x"|a{i+1}\n' for i in range(4000))
GrammarCompiler(byte_tokenizer(), 260, [257]).compile(OutputGrammar("lark", f'start:a0\n{rules}a4000:"x"'))
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], timeout=120)
