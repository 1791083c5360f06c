"""Guesses from a request's own text: where they come from, how many are tried, and that they change but time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex._core import TokenHistory
from caudex.engine.config import EngineConfig
from caudex.engine.drafting import EXTRA_COST, ROWS_WHILE_READING, Drafting
from caudex.engine.prompt_lookup import PromptLookup
from caudex.engine.step import ScheduledChunk, Step
from caudex.engine.types import OutputGrammar, SamplingParams

from .conftest import VOCAB_SIZE
from .harness import Result, assert_nothing_leaked, greedy, running_engine, serve, settled, submit
from .oracle import Answers, guessing
from .virtual_engine import make_state

PROMPT = list(b"The caudex is the base")


def slow_continuation(tokens: list[int], shortest: int, longest: int, limit: int) -> tuple[int, list[int]]:
    for matched in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, matched - 1, -1):
            if tokens[end - matched : end] == tokens[len(tokens) - matched :]:
                text = list(tokens)
                for place in range(end, end + limit):
                    text.append(text[place])
                return matched, text[len(tokens) :]
    return 0, []


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=300),
    cut=st.integers(0, 300),
    shortest=st.integers(2, 4),
    more=st.integers(0, 6),
    limit=st.integers(0, 9),
    silence=st.integers(0, 200),
)
def test_a_continuation_is_the_latest_after_the_longest_match(
    tokens: list[int], cut: int, shortest: int, more: int, limit: int, silence: int
) -> None:
    tokens = tokens[:20] + [9] * silence + tokens[20:]
    history = TokenHistory()
    history.append(tokens[:cut])
    history.append(np.array(tokens[cut:], dtype=np.int32))
    assert len(history) == len(tokens)
    expected = slow_continuation(tokens, shortest, shortest + more, limit)
    assert history.continuation(shortest, shortest + more, limit) == expected


def test_a_match_is_of_two_tokens_or_more() -> None:
    for arguments in ((1, 4, 4), (4, 3, 4), (3, 4, -1)):
        with pytest.raises(ValueError, match=f"got {arguments[0]} to {arguments[1]} tokens and the limit"):
            TokenHistory().continuation(*arguments)


def test_acceptance_follows_what_came_true_whether_it_was_tried_or_not() -> None:
    lookup = PromptLookup(np.array([1, 2, 3, 4, 5, 6, 1, 2], dtype=np.int32))
    assert lookup.guess([3], 3) == [4, 5, 6]
    assert lookup.guess([3, 4], 3) == [5, 6, 1]
    once = lookup.acceptance
    assert once == PromptLookup.START + PromptLookup.RATE * (1 - PromptLookup.START)
    lookup.guess([3, 4, 5, 9], 3)
    right = once + PromptLookup.RATE * (1 - once)
    assert lookup.acceptance == right - PromptLookup.RATE * right, "one was right, the next was wrong"
    lookup.guess([3, 4, 5, 9, 7], 3)
    assert lookup.acceptance == right - PromptLookup.RATE * right, "nothing was guessed, so nothing is learnt"


def step_of(chances: list[float], num_left: int, num_prefill: int) -> Step:
    """Decoding requests whose guesses go on for ever, beside a prompt."""
    step = Step()
    for place, chance in enumerate(chances):
        state = make_state(place, [5] * 9, num_left + 1, output=[5])
        state.lookup = PromptLookup(state.prompt)
        state.lookup.acceptance = chance
        step.add(ScheduledChunk(state, 9, 10, samples=True))
    if num_prefill:
        step.add(ScheduledChunk(make_state(99, [5] * num_prefill, 5), 0, num_prefill, samples=True))
    return step


@settings(max_examples=200, deadline=None)
@given(
    chances=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    max_tokens=st.integers(1, 9),
    spare=st.integers(0, 40),
    num_left=st.integers(1, 9),
    num_prefill=st.sampled_from([0, 0, 30]),
)
def test_drafts_make_the_most_tokens_a_second(
    chances: list[float], max_tokens: int, spare: int, num_left: int, num_prefill: int
) -> None:
    """Within all limits, the likeliest tokens, and so many that neither more nor fewer would come sooner."""
    step = step_of(chances, num_left, num_prefill)
    drafts = dict(Drafting(max_tokens).choose(step, spare))
    longest = min(max_tokens, num_left - 1)
    lengths = [len(drafts.get(place, [])) for place in range(len(chances))]
    assert max(lengths) <= longest
    assert sum(lengths) <= spare
    ranked = sorted((chance**i for chance in chances for i in range(1, longest + 1)), reverse=True)[:spare]
    tried = sorted(chance**i for chance, n in zip(chances, lengths, strict=True) for i in range(1, n + 1))
    assert tried[::-1] == ranked[: len(tried)]

    def tokens_a_second(extra: int) -> float:
        rows = step.num_tokens + extra
        return (step.num_tokens + sum(ranked[:extra])) / max(1 + EXTRA_COST * extra, rows / ROWS_WHILE_READING)

    best = max(tokens_a_second(extra) for extra in range(len(ranked) + 1))
    assert tokens_a_second(len(tried)) == pytest.approx(best, rel=1e-9)


WISHES = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.8, max_tokens=30, seed=4, top_p=0.9, min_tokens=7, stop=("a", "e")),
    SamplingParams(temperature=0.9, max_tokens=30, seed=5, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, max_tokens=30, seed=6, stop_token_ids=tuple(range(40, 80)), prompt_logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=30, seed=7, logit_bias={65: 50.0, 66: 50.0}, stop=("ABBA", "BB")),
    SamplingParams(temperature=0.0, max_tokens=1, logprobs=1),
]


def seen(result: Result) -> object:
    """All that an owner is told, but for how it is cut into outputs."""
    last, scores = result.wait().last, result.outputs[0].prompt_logprobs
    told = (last.num_prompt_tokens, last.num_output_tokens, last.finish_reason, last.stop_reason)
    return result.tokens, result.logprobs, scores, result.text, told


@pytest.mark.parametrize("error", [0.0, 0.3, 1.0, None], ids=["right", "mostly right", "wrong", "by lookup"])
@pytest.mark.parametrize(
    ("architecture", "num_blocks", "block_size"),
    [("llama", 200, 4), ("gpt2", 16, 16), ("qwen3", 70, 2)],
    ids=["roomy", "tight", "small"],
)
def test_guesses_change_nothing_but_time(
    error: float | None, architecture: str, num_blocks: int, block_size: int, tiny_model: Callable[[str], Path]
) -> None:
    """Whatever is guessed: tokens, log-probabilities, text, reasons and counts are those without guesses."""
    common = {"model": str(tiny_model(architecture)), "num_blocks": num_blocks, "block_size": block_size}
    prompts = [PROMPT, PROMPT[:5], PROMPT * 2, [65, 66] * 8]
    asked = [(prompt, wish) for prompt in prompts for wish in WISHES]
    with running_engine(**common, prompt_lookup_tokens=0) as engine:
        expected = [seen(submit(engine, *one)) for one in asked]
        assert settled(engine).draft_tokens == 0
    answers: Answers = {}
    for (prompt, _), (tokens, *_) in zip(asked, expected, strict=True):
        answers.setdefault(tuple(prompt), []).append(tokens)
    rng = random.Random(0)
    for _ in range(2):
        with running_engine(**common, prompt_lookup_tokens=rng.choice([2, 5]), max_num_seqs=4) as engine:
            order = rng.sample(range(len(asked)), len(asked))
            if error is None:
                results = [submit(engine, *asked[place]) for place in order]
            else:
                with guessing(answers, rng, error, VOCAB_SIZE):
                    results = [submit(engine, *asked[place]) for place in order]
            for place, result in zip(order, results, strict=True):
                assert seen(result) == expected[place], asked[place]
            stats = settled(engine)
            assert stats.generation_tokens == sum(len(result.tokens) for result in results)
            assert stats.draft_tokens > 0
            assert (stats.accepted_draft_tokens > 0) == (error != 1.0)
            if error == 0.0:
                assert max(len(output.token_ids) for result in results for output in result.outputs) > 2
            assert_nothing_leaked(engine)


def test_right_guesses_save_steps_and_come_together(tiny_model: Callable[[str], Path]) -> None:
    params = greedy(41, logprobs=1)
    with running_engine(model=str(tiny_model("llama")), num_blocks=64, prompt_lookup_tokens=4) as engine:
        with guessing({}, random.Random(0), 0.0, VOCAB_SIZE):
            alone = submit(engine, PROMPT, params).wait()
        with guessing({tuple(PROMPT): [alone.tokens]}, random.Random(0), 0.0, VOCAB_SIZE):
            guessed = submit(engine, PROMPT, params).wait()
    assert seen(guessed) == seen(alone)
    assert [len(output.token_ids) for output in alone.outputs] == [1] * 41
    assert [len(output.token_ids) for output in guessed.outputs] == [1, *[5] * 8]
    assert [output.num_output_tokens for output in guessed.outputs] == [1, *range(6, 42, 5)]
    assert [len(output.logprobs) for output in guessed.outputs] == [1, *[5] * 8]


def test_a_request_that_ends_inside_its_draft_drops_the_rest(tiny_model: Callable[[str], Path]) -> None:
    """At each of its places: what was guessed behind the end was right, and is neither told nor kept."""
    with running_engine(model=str(tiny_model("llama")), num_blocks=64, block_size=4, prompt_lookup_tokens=9) as engine:
        whole = submit(engine, PROMPT, greedy(30)).wait()
        with guessing({tuple(PROMPT): [whole.tokens]}, random.Random(0), 0.0, VOCAB_SIZE):
            for length in range(1, 30):
                engine.reset_prefix_cache()
                before = settled(engine).accepted_draft_tokens
                ended = submit(engine, PROMPT, greedy(30, stop_token_ids=(whole.tokens[length - 1],))).wait()
                expected = whole.tokens[: whole.tokens.index(whole.tokens[length - 1]) + 1]
                assert (ended.tokens, ended.last.finish_reason) == (expected, "stop")
                assert settled(engine).accepted_draft_tokens - before == len(expected) - len(ended.outputs)
                stop = whole.text[length % (len(whole.text) - 1) :][:2]
                cut = submit(engine, PROMPT, greedy(30, stop=(stop,))).wait()
                assert (cut.text, cut.last.stop_reason) == (whole.text[: whole.text.index(stop)], stop)
                after = submit(engine, [*PROMPT, *whole.tokens], greedy(1)).wait()
                assert after.last.num_cached_tokens == len(PROMPT) + max(len(ended.tokens), len(cut.tokens)) - 1


def test_wrong_guesses_leave_no_trace_in_the_cache(tiny_model: Callable[[str], Path]) -> None:
    """What is found later, by a request that goes on from an answer, is what was said and not what was guessed."""
    with running_engine(model=str(tiny_model("llama")), num_blocks=64, block_size=4) as engine:
        answer = submit(engine, PROMPT, greedy(21)).wait().tokens
        longer = [*PROMPT, *answer]
        expected = submit(engine, longer, greedy(9, logprobs=1)).wait()
        for error in (0.0, 0.5, 1.0):
            engine.reset_prefix_cache()
            with guessing({tuple(PROMPT): [answer]}, random.Random(1), error, VOCAB_SIZE):
                assert submit(engine, PROMPT, greedy(21)).wait().tokens == answer
            after = submit(engine, longer, greedy(9, logprobs=1)).wait()
            assert seen(after) == seen(expected)
            assert after.last.num_cached_tokens == len(longer) - 1


def test_an_answer_that_repeats_itself_is_guessed(tiny_model: Callable[[str], Path]) -> None:
    """Nothing but the text itself tells what comes next here."""
    params = SamplingParams(temperature=0.0, max_tokens=60, logit_bias={65: 100.0}, ignore_eos=True)
    with running_engine(model=str(tiny_model("llama")), num_blocks=64) as engine:
        result = submit(engine, PROMPT, params).wait()
        assert result.tokens == [65] * 60
        assert len(result.outputs) < 30
        assert settled(engine).accepted_draft_tokens == 60 - len(result.outputs)


def test_what_cannot_be_taken_back_is_not_guessed(tiny_model: Callable[[str], Path]) -> None:
    grammar = SamplingParams(temperature=0.0, max_tokens=40, grammar=OutputGrammar("regex", "(ab){9}"))
    with running_engine(model=str(tiny_model("llama")), num_blocks=64) as engine:
        assert submit(engine, PROMPT, grammar).wait().text == "ab" * 9
        assert settled(engine).draft_tokens == 0
    with running_engine(model=str(tiny_model("llama")), num_blocks=64, attention_backend="torch") as engine:
        serve(engine, [[65, 66] * 9], replace(grammar, grammar=None, logit_bias={65: 100.0}))
        assert settled(engine).draft_tokens == 0


def test_an_owner_that_leaves_in_the_middle_of_a_draft(tiny_model: Callable[[str], Path]) -> None:
    """Aborts at every step, beside others that go on."""
    with running_engine(model=str(tiny_model("llama")), num_blocks=40, block_size=4, max_num_seqs=4) as engine:
        answers = {tuple(PROMPT): [submit(engine, PROMPT, greedy(40)).wait().tokens]}
        rng = random.Random(2)
        with guessing(answers, rng, 0.2, VOCAB_SIZE):
            results = [submit(engine, PROMPT, greedy(40)) for _ in range(40)]
            for result in results[::2]:
                engine.abort(result.request_id)
            for result in results:
                expected = answers[tuple(PROMPT)][0]
                last = result.wait().last
                assert result.tokens == expected[: len(result.tokens)]
                assert last.num_output_tokens == len(result.tokens)
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("value", [-1, 65])
def test_the_length_of_drafts_is_bounded(value: int) -> None:
    with pytest.raises(ValueError, match=f"prompt_lookup_tokens is {value}"):
        EngineConfig(prompt_lookup_tokens=value)


@pytest.mark.model
def test_smollm2_quotes_its_prompt_sooner_in_the_same_bits(default_model: Path) -> None:
    text = "Repeat this list: copper, barley, lantern, violin, harbor, granite, pepper, saddle.\n"
    bits = []
    for tokens in (0, 4):
        with running_engine(model=str(default_model), num_blocks=64, prompt_lookup_tokens=tokens) as engine:
            prompt = engine.tokenizer.encode(text * 3)
            for temperature in (0.0, 0.7):
                params = SamplingParams(temperature=temperature, seed=1, max_tokens=48, logprobs=2, ignore_eos=True)
                bits.append(seen(submit(engine, prompt, params)))
            accepted = settled(engine).accepted_draft_tokens
    assert bits[:2] == bits[2:]
    assert accepted > 20
