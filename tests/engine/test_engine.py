"""The engine's manners: stopping, seeds, refusals, failures, shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from caudex.engine.batch import StepBatch
from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.kv_memory import KvMemory
from caudex.engine.runner import ModelRunner
from caudex.engine.types import EngineDeadError, GenerationRequest, SamplingParams

from .harness import Result, assert_nothing_leaked, greedy, running_engine, serve, submit

PROMPT = list(b"The caudex is the base")


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with running_engine(model=str(tiny_model("llama")), num_blocks=64, max_model_len=200) as engine:
        yield engine


def test_stop_strings_are_cut_wherever_tokens_break_them(engine: Engine) -> None:
    whole = submit(engine, PROMPT, greedy(40)).wait()
    text = whole.text
    stop = text[7:10]
    result = submit(engine, PROMPT, greedy(40, stop=(stop,))).wait()
    assert result.text == text[: text.index(stop)]
    assert (result.last.finish_reason, result.last.stop_reason) == ("stop", stop)
    assert len(result.tokens) < len(whole.tokens)


def test_stop_tokens_and_lengths(engine: Engine) -> None:
    tokens = submit(engine, PROMPT, greedy(20)).wait().tokens
    stopped = submit(engine, PROMPT, greedy(20, stop_token_ids=(tokens[5],))).wait()
    assert stopped.tokens == tokens[: tokens.index(tokens[5]) + 1]
    assert (stopped.last.finish_reason, stopped.last.stop_reason) == ("stop", tokens[5])
    long = submit(engine, [1] * 190, greedy(1000)).wait()
    assert (long.last.finish_reason, len(long.tokens)) == ("length", 10)


def test_the_models_end_token_ends_a_text(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={257: 100.0})
    result = submit(engine, PROMPT, params).wait()
    assert (result.tokens, result.text, result.last.finish_reason, result.last.stop_reason) == ([257], "", "stop", None)


def test_outputs_count_what_they_report(engine: Engine) -> None:
    submit(engine, PROMPT, greedy(5)).wait()
    result = submit(engine, PROMPT, greedy(5, logprobs=2)).wait()
    assert result.last.num_prompt_tokens == len(PROMPT)
    assert result.last.num_cached_tokens == len(PROMPT) - 1
    assert [output.num_output_tokens for output in result.outputs] == [1, 2, 3, 4, 5]
    assert [logprob.token_id for logprob in result.logprobs] == result.tokens
    for logprob in result.logprobs:
        assert logprob.top[0] == (logprob.token_id, logprob.logprob), "greedy takes the most likely"
        assert logprob.top[0][1] >= logprob.top[1][1]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_prompt_is_scored_cold_hot_and_in_chunks(backend: str, tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model("llama")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], -1)
    with running_engine(
        model=str(directory), attention_backend=backend, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=9
    ) as engine:
        plain = submit(engine, PROMPT, greedy(3)).wait().tokens
        company = [submit(engine, [3] * 40, greedy(20)) for _ in range(2)]
        for _ in range(2):
            result = submit(engine, PROMPT, greedy(3, prompt_logprobs=2)).wait()
            scores = result.outputs[0].prompt_logprobs
            assert result.tokens == plain
            assert [score.token_id for score in scores] == PROMPT[1:]
            for position, score in enumerate(scores):
                assert score.logprob == pytest.approx(expected[position, PROMPT[position + 1]].item(), abs=2e-4)
                assert score.top[0][0] == int(expected[position].argmax())
            assert not any(output.prompt_logprobs for output in result.outputs[1:])
        for other in company:
            other.wait()
        assert submit(engine, PROMPT, greedy(3)).wait().last.num_cached_tokens == len(PROMPT) - 1


def test_a_scored_prompt_is_not_scored_again(tiny_model: Callable[[str], Path]) -> None:
    """Scores found by others are the same bits as those computed, whole blocks or not, and count as cached."""
    with running_engine(model=str(tiny_model("llama")), num_blocks=64, block_size=4, max_num_seqs=4) as engine:
        alone = {}
        for prompt in ([*PROMPT, 65], [*PROMPT, 66, 67], PROMPT[:9]):
            engine.reset_prefix_cache()
            alone[len(prompt)] = submit(engine, prompt, greedy(1, prompt_logprobs=3)).wait().outputs[0].prompt_logprobs
        engine.reset_prefix_cache()
        cached = []
        for prompt in ([*PROMPT, 65], [*PROMPT, 66, 67], PROMPT[:9]):
            for wanted in (3, 1):
                result = submit(engine, prompt, greedy(1, prompt_logprobs=wanted)).wait()
                expected = [replace(score, top=score.top[:wanted]) for score in alone[len(prompt)]]
                assert list(result.outputs[0].prompt_logprobs) == expected
                cached.append(result.last.num_cached_tokens)
        size = len(PROMPT)
        assert cached == [0, size - 1, size - 1, size, 7, 7], "all but the last scored token, whose logits are needed"


def test_a_prompt_can_be_scored_alone(engine: Engine) -> None:
    generated = engine.stats().generation_tokens
    result = submit(engine, PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0)).wait()
    assert (result.tokens, result.text, result.last.finish_reason) == ([], "", "length")
    assert len(result.last.prompt_logprobs) == len(PROMPT) - 1
    assert engine.stats().generation_tokens == generated
    with pytest.raises(ValueError, match="max_tokens is 0"):
        SamplingParams(max_tokens=0)


def test_nothing_ends_a_text_too_early(engine: Engine) -> None:
    wants_to_end = {"temperature": 0.0, "max_tokens": 20, "logit_bias": {257: 100.0}}
    result = submit(engine, PROMPT, SamplingParams(**wants_to_end, min_tokens=6)).wait()
    assert (len(result.tokens), result.tokens[-1], result.last.finish_reason) == (7, 257, "stop")
    free = submit(engine, PROMPT, greedy(20)).wait()
    stop = submit(engine, PROMPT, greedy(20, min_tokens=9, stop_token_ids=tuple(set(free.tokens)))).wait()
    assert len(stop.tokens) == 10
    assert not set(stop.tokens[:9]) & set(free.tokens)
    late = submit(engine, PROMPT, greedy(20, min_tokens=19, stop=(free.text[0],))).wait()
    assert late.text[:1] == free.text[:1], "a stop string found too early does not end the text"
    with pytest.raises(ValueError, match="min_tokens is 21"):
        greedy(20, min_tokens=21)


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("extra", [0, 5], ids=["block boundary", "inside a block"])
def test_samples_get_the_bits_they_get_alone(index: str, extra: int, tiny_model: Callable[[str], Path]) -> None:
    prompt = [*PROMPT[:16], *[3] * extra]
    params = SamplingParams(temperature=1.0, max_tokens=9, seed=5, logprobs=2, ignore_eos=True, prompt_logprobs=1)
    with running_engine(model=str(tiny_model("llama")), num_blocks=64, block_size=8, index=index) as engine:
        alone = [engine.generate([prompt], replace(params, seed=5 + i))[0] for i in range(4)]
        engine.reset_prefix_cache()
        queried = engine.stats().prefix_cache_queries
        together = engine.sample(prompt, params, 4)
        assert engine.stats().prefix_cache_queries == queried + len(prompt), "the others branched off the first"
        for one, other in zip(alone, together, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
            assert one.prompt_logprobs == other.prompt_logprobs
        assert len({tuple(other.token_ids) for other in together}) > 1
        assert_nothing_leaked(engine)


def test_a_sample_of_another_prompt_is_a_request_of_its_own(engine: Engine) -> None:
    first, other = submit(engine, PROMPT, greedy(9)), Result("other")
    engine.submit(GenerationRequest("other", PROMPT[::-1], greedy(9), sample_of=first.request_id), other.take)
    assert other.wait().tokens == submit(engine, PROMPT[::-1], greedy(9)).wait().tokens
    first.wait()


def test_stops_are_bounded() -> None:
    with pytest.raises(ValueError, match="stop holds 65 strings"):
        SamplingParams(stop=("a",) * 65)
    with pytest.raises(ValueError, match="a string of 1025 characters"):
        SamplingParams(stop=("a" * 1025,))


def test_a_seed_fixes_a_requests_samples_in_any_company(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=7, ignore_eos=True)
    alone = submit(engine, PROMPT, params).wait().tokens
    others = [submit(engine, [3, 1, 4], SamplingParams(max_tokens=40, ignore_eos=True)) for _ in range(3)]
    beside = submit(engine, PROMPT, params).wait().tokens
    assert alone == beside
    assert alone != submit(engine, PROMPT, SamplingParams(max_tokens=24, seed=8, ignore_eos=True)).wait().tokens
    assert len({tuple(other.wait().tokens) for other in others}) > 1, "requests without a seed draw differently"


def test_requests_that_cannot_be_served_are_refused_at_once(engine: Engine) -> None:
    refused = [
        ([], "empty"),
        ([1] * 200, "200 tokens.*at most 200"),
        ([1, 260], "prompt has token id 260"),
        ([-1], "prompt has token id -1"),
        ([10**30], "prompt has token id 1000"),
    ]
    for prompt, message in refused:
        with pytest.raises(ValueError, match=message):
            submit(engine, prompt, greedy(1))
    for token_id in (-1, 260, 10**30):
        with pytest.raises(ValueError, match=f"logit_bias has token id {token_id}"):
            submit(engine, [1], SamplingParams(logit_bias={5: 1.0, token_id: 1.0}))
    for priority in (2**31, -(2**63)):
        with pytest.raises(ValueError, match=f"priority is {priority}"):
            GenerationRequest("id", [1], priority=priority)
    assert engine.stats().num_requests_waiting == 0


def test_an_id_is_in_use_until_its_request_ends(engine: Engine) -> None:
    result = Result("twice")
    engine.submit(GenerationRequest("twice", PROMPT, greedy(60)), result.take)
    with pytest.raises(ValueError, match="'twice' is in use"):
        engine.submit(GenerationRequest("twice", PROMPT, greedy(1)), result.take)
    result.wait()
    again = Result("twice")
    engine.submit(GenerationRequest("twice", PROMPT, greedy(1)), again.take)
    again.wait()


def test_an_abort_ends_a_request_and_frees_its_blocks(engine: Engine) -> None:
    started = threading.Event()
    result = Result("long")

    def take(output: object) -> None:
        result.take(output)  # type: ignore[arg-type]
        started.set()

    engine.submit(GenerationRequest("long", PROMPT, greedy(150)), take)
    assert started.wait(60)
    engine.abort("long")
    engine.abort("never heard of")
    assert result.wait().last.finish_reason == "abort"
    submit(engine, [1], greedy(1)).wait()
    assert_nothing_leaked(engine)


def test_namespaces_do_not_share(engine: Engine) -> None:
    cached = [
        submit(engine, PROMPT, greedy(1), namespace=namespace).wait().last.num_cached_tokens
        for namespace in ("a", "b", "a")
    ]
    assert cached == [0, 0, len(PROMPT) - 1]


def test_tenants_share_as_the_engine_is_told(tiny_model: Callable[[str], Path]) -> None:
    for sharing, expected in (("isolated", [0, 0, len(PROMPT) - 1]), ("shared", [0, len(PROMPT) - 1, len(PROMPT) - 1])):
        with running_engine(model=str(tiny_model("llama")), num_blocks=64, sharing=sharing) as engine:
            cached = [
                submit(engine, PROMPT, greedy(1), tenant=tenant).wait().last.num_cached_tokens
                for tenant in ("a", "b", "a")
            ]
        assert cached == expected


def test_a_kept_session_outlasts_a_flood(tiny_model: Callable[[str], Path]) -> None:
    """A conversation's blocks survive other traffic that fills the pool, until their time is over."""
    with running_engine(model=str(tiny_model("llama")), num_blocks=16, max_model_len=128) as engine:
        flood = [[7, i] * 30 for i in range(20)]
        for ttl, kept in ((0.0, 0), (3600.0, 96)):
            conversation = [int(ttl) % 251 + 1] * 100
            submit(engine, conversation, greedy(1), session_id="s", cache_ttl=ttl).wait()
            serve(engine, flood, greedy(1))
            result = submit(engine, conversation, greedy(1), session_id="s").wait()
            assert result.last.num_cached_tokens >= kept
            if not kept:
                assert result.last.num_cached_tokens == 0, "the flood is meant to fill the pool"
        serve(engine, flood, greedy(1))
        assert submit(engine, conversation, greedy(1)).wait().last.num_cached_tokens == 0
        assert_nothing_leaked(engine)


def test_kept_sessions_give_way_to_a_request_that_needs_the_whole_pool(tiny_model: Callable[[str], Path]) -> None:
    with running_engine(model=str(tiny_model("llama")), num_blocks=8, max_model_len=128) as engine:
        for _ in range(2):
            submit(engine, [9] * 60, greedy(1), session_id="s", cache_ttl=3600.0).wait()
            assert engine.stats().num_pinned_blocks > 0
            for prompt, length in (([1] * 100, 20), ([2] * 10, 110)):
                result = submit(engine, prompt, greedy(length)).wait()
                assert (result.last.finish_reason, len(result.tokens)) == ("length", length)
            assert_nothing_leaked(engine)


def test_a_kept_session_expires(tiny_model: Callable[[str], Path]) -> None:
    with running_engine(model=str(tiny_model("llama")), num_blocks=16, max_model_len=128) as engine:
        submit(engine, [9] * 100, greedy(1), session_id="s", cache_ttl=0.3).wait()
        assert engine.stats().num_pinned_blocks > 0
        deadline = time.monotonic() + 30
        while engine.stats().num_pinned_blocks and time.monotonic() < deadline:
            time.sleep(0.05)
        assert_nothing_leaked(engine)


@pytest.mark.parametrize("name", ["a\0b", "a\x1fb"])
def test_a_namespace_cannot_hold_what_separates_names(name: str) -> None:
    for field in ("namespace", "tenant"):
        with pytest.raises(ValueError, match=f"{field} is .* control characters"):
            GenerationRequest("r", [1], **{field: name})  # type: ignore[arg-type]


def test_reset_forgets_the_cache(engine: Engine) -> None:
    submit(engine, PROMPT, greedy(1)).wait()
    engine.reset_prefix_cache()
    assert submit(engine, PROMPT, greedy(1)).wait().last.num_cached_tokens == 0


def test_an_owner_that_raises_loses_its_request_only(engine: Engine) -> None:
    def take(output: object) -> None:
        raise RuntimeError("the client is gone")

    engine.submit(GenerationRequest("rude", PROMPT, greedy(50)), take)
    assert submit(engine, PROMPT, greedy(5)).wait().last.finish_reason == "length"
    assert engine.is_alive
    assert_nothing_leaked(engine)


def test_shutdown_drains_or_aborts(tiny_model: Callable[[str], Path]) -> None:
    for drain, reason in ((True, "length"), (False, "abort")):
        engine = Engine.load(EngineConfig(model=str(tiny_model("llama")), num_blocks=64, num_threads=1))
        engine.start()
        results = [submit(engine, PROMPT, greedy(100)) for _ in range(3)]
        assert engine.shutdown(drain=drain)
        assert [result.wait().last.finish_reason for result in results] == [reason] * 3
        assert not engine.is_alive
        with pytest.raises(EngineDeadError, match="shut down"):
            submit(engine, PROMPT, greedy(1))


class FailingRunner(ModelRunner):
    """A runner that raises on the steps whose numbers are in `bad`."""

    def __init__(self, inner: ModelRunner, bad: set[int]) -> None:
        self.inner, self.bad, self.num_steps = inner, bad, 0

    @property
    def kv_memory(self) -> KvMemory:
        return self.inner.kv_memory

    def copy_blocks(self, copies: object) -> None:
        self.inner.copy_blocks(copies)  # type: ignore[arg-type]

    def run(self, batch: StepBatch) -> Tensor:
        self.num_steps += 1
        if self.num_steps in self.bad:
            raise MemoryError("the machine is full")
        return self.inner.run(batch)


def break_steps(engine: Engine, bad: set[int]) -> None:
    engine._loop._runner = FailingRunner(engine._loop._runner, bad)


def test_a_step_that_raises_fails_its_requests_and_no_other(engine: Engine) -> None:
    expected = submit(engine, PROMPT, greedy(5)).wait().tokens
    engine.reset_prefix_cache()
    break_steps(engine, {2})
    failed = submit(engine, PROMPT, greedy(5)).wait()
    assert failed.last.finish_reason == "error"
    assert "the machine is full" in (failed.last.error or "")
    after = submit(engine, PROMPT, greedy(5)).wait()
    assert after.tokens == expected
    assert after.last.num_cached_tokens == 0, "what a failed step promised must not be believed"
    assert_nothing_leaked(engine)


def test_steps_that_keep_raising_kill_the_engine(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine.load(EngineConfig(model=str(tiny_model("llama")), num_blocks=64, num_threads=1, max_num_seqs=1))
    break_steps(engine, set(range(100)))
    results = [submit(engine, PROMPT, greedy(5)) for _ in range(6)]
    engine.start()
    assert [result.wait().last.finish_reason for result in results] == ["error"] * 6
    assert engine.shutdown()
    assert isinstance(engine.error, MemoryError)
    assert not engine.is_alive
    with pytest.raises(EngineDeadError, match="the machine is full"):
        submit(engine, PROMPT, greedy(1))


def test_torch_is_left_with_one_thread_beside_ours(engine: Engine) -> None:
    serve(engine, [PROMPT], greedy(2))
    assert torch.get_num_threads() == 1
