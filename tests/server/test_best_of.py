"""The best of several samples, and several samples of one prompt."""

from __future__ import annotations

import pytest

PROMPT = "The caudex is the thick base of"
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}


def test_the_likeliest_samples_are_answered(server) -> None:
    every = server.complete(PROMPT, n=6, logprobs=0, **SAMPLED)["choices"]
    likeliest = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    for count in (1, 2, 6):
        kept = server.complete(PROMPT, n=count, best_of=6, **SAMPLED)
        texts = [choice["text"] for choice in (likeliest[:count] if count < 6 else every)]
        assert [choice["text"] for choice in kept["choices"]] == texts
        assert [choice["index"] for choice in kept["choices"]] == list(range(count))
        assert kept["choices"][0]["logprobs"] is None
        assert kept["usage"]["completion_tokens"] == 6 * 6, "what was generated was generated"


def test_each_prompt_has_its_best(server) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    alone = [server.complete(prompt, best_of=4, **SAMPLED)["choices"][0]["text"] for prompt in prompts]
    assert [choice["text"] for choice in server.complete(prompts, best_of=4, **SAMPLED)["choices"]] == alone


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 0}, {"best_of": 2, "stream": True}])
def test_what_cannot_be_chosen_is_refused(server, fields: dict) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "best_of"


def test_samples_of_a_prompt_look_it_up_once(fresh_server) -> None:
    with fresh_server() as running:
        usage = running.complete(PROMPT, n=5, **SAMPLED)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        stats = running.settled(lambda stats: stats.num_requests_running == 0)
        assert stats.prefix_cache_queries == len(PROMPT)
        assert stats.num_pinned_blocks == 0


def test_min_tokens_holds_off_the_end(server) -> None:
    wants_to_end = {"logit_bias": {"257": 100}, "max_tokens": 9, "return_token_ids": True}
    assert server.complete(PROMPT, **wants_to_end)["choices"][0]["token_ids"] == [257]
    choice = server.complete(PROMPT, **wants_to_end, min_tokens=4)["choices"][0]
    assert len(choice["token_ids"]) == 5
    assert choice["finish_reason"] == "stop"
