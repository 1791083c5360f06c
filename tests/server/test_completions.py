"""POST /v1/completions, answered by a tiny random model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PROMPT = "The quick brown fox jumps over the lazy dog"


def test_answer_is_the_models_own(server, greedy: Callable) -> None:
    ids = server.engine.tokenizer.encode(PROMPT)
    answer = server.complete(PROMPT, max_tokens=12, ignore_eos=True, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == greedy(ids, 12)
    assert choice["text"] == server.engine.tokenizer.decode(choice["token_ids"])
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"


def test_the_four_forms_of_a_prompt_mean_the_same(server) -> None:
    ids = server.engine.tokenizer.encode(PROMPT)
    forms = (PROMPT, [PROMPT], ids, [ids])
    assert len({server.complete(form)["choices"][0]["text"] for form in forms}) == 1


def test_several_prompts_answer_in_their_order(server) -> None:
    prompts = ["alpha", "beta", "gamma"]
    answer = server.complete(prompts, n=2)
    alone = [server.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [text for text in alone for _ in range(2)]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(len(prompt) for prompt in prompts)
    assert usage["completion_tokens"] == 6 * 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_repeated_prompt_is_cached_but_for_its_last_token(fresh_server) -> None:
    with fresh_server() as server:
        prompt = "x" * 100
        first = server.complete(prompt)
        second = server.complete(prompt)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 99
        assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_salts_keep_caches_apart(fresh_server) -> None:
    with fresh_server() as server:
        prompt = "y" * 64

        def cached(**fields: str) -> int:
            return server.complete(prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached() == 0
        assert cached(cache_salt="tenant-a") == 0
        assert cached(cache_salt="tenant-b") == 0
        assert cached(cache_salt="tenant-a") == 63
        assert cached() == 63


def test_without_prefix_caching_nothing_is_cached(fresh_server) -> None:
    with fresh_server(enable_prefix_caching=False) as server:
        for _ in range(2):
            assert server.complete("z" * 64)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_reset_forgets_the_cache(fresh_server) -> None:
    with fresh_server() as server:
        server.complete("w" * 64)
        assert server.http.post("/reset_prefix_cache").status_code == 200
        assert server.complete("w" * 64)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_echo_of_which_nothing_follows(server) -> None:
    answer = server.complete(PROMPT, echo=True, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (PROMPT, None, "length")
    assert answer["usage"]["completion_tokens"] == 0


def test_echo_puts_the_prompt_in_front(server) -> None:
    plain = server.complete(PROMPT)["choices"][0]["text"]
    assert server.complete(PROMPT, echo=True)["choices"][0]["text"] == PROMPT + plain


def test_logprobs_are_those_of_the_tokens(server) -> None:
    choice = server.complete(PROMPT, logprobs=3, return_token_ids=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [server.engine.tokenizer.token(token) for token in choice["token_ids"]]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert value <= 0
        assert max(top.values()) == pytest.approx(value)
        assert token in top


def test_a_seed_repeats_a_sample_and_choices_differ(server) -> None:
    fields = {"temperature": 1.0, "seed": 11, "n": 4, "max_tokens": 16}
    one = [choice["text"] for choice in server.complete(PROMPT, **fields)["choices"]]
    two = [choice["text"] for choice in server.complete(PROMPT, **fields)["choices"]]
    assert one == two
    assert len(set(one)) > 1


def test_a_stop_string_ends_the_text_before_itself(server) -> None:
    text = server.complete(PROMPT, max_tokens=24, ignore_eos=True)["choices"][0]["text"]
    stop = text[5:7]
    choice = server.complete(PROMPT, max_tokens=24, ignore_eos=True, stop=[stop])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == text[: text.index(stop)]


def test_logit_bias_and_penalties_change_what_is_said(server) -> None:
    plain = server.complete(PROMPT, max_tokens=16, return_token_ids=True)["choices"][0]["token_ids"]
    banned = server.complete(PROMPT, max_tokens=16, return_token_ids=True, logit_bias={str(plain[0]): -100})
    assert plain[0] not in banned["choices"][0]["token_ids"]
    forced = server.complete(PROMPT, max_tokens=4, logit_bias={"65": 100}, ignore_eos=True, return_token_ids=True)
    assert forced["choices"][0]["token_ids"] == [65] * 4
    two = {"logit_bias": {"65": 100, "66": 100}, "frequency_penalty": 2, "ignore_eos": True, "max_tokens": 16}
    assert set(server.complete(PROMPT, return_token_ids=True, **two)["choices"][0]["token_ids"]) == {65, 66}


def test_top_k_minus_one_is_no_top_k(server) -> None:
    assert server.complete(PROMPT, top_k=-1)["choices"][0]["text"] == server.complete(PROMPT)["choices"][0]["text"]


def test_the_openai_client_streams_the_same_text(server) -> None:
    whole = server.openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
    stream = server.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
