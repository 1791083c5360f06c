"""Log-probabilities of the prompt, in OpenAI's columns (`echo`) and vLLM's entries, and what the cache saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

PROMPT = "The caudex is the thick base"


@pytest.fixture(scope="module")
def expected(model_directory: Path) -> Callable[[list[int]], torch.Tensor]:
    """transformers' own log-probabilities: row i is the distribution of token i + 1."""
    model = transformers.LlamaForCausalLM.from_pretrained(model_directory, dtype=torch.float32)

    def of(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)

    return of


@pytest.fixture
def own(fresh_server) -> Iterator:
    with fresh_server() as running:
        yield running


def test_an_echoed_prompt_is_scored(server, expected) -> None:
    tokens = server.engine.tokenizer.encode(PROMPT)
    rows = expected(tokens)
    answer = server.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, temperature=0, echo=True, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.tokens[: len(PROMPT)] == list(PROMPT)
    assert logprobs.text_offset == list(range(len(logprobs.tokens)))
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    for place, token in enumerate(tokens[1:]):
        assert logprobs.token_logprobs[place + 1] == pytest.approx(rows[place, token].item(), abs=1e-3)
        assert max(logprobs.top_logprobs[place + 1].values()) == pytest.approx(rows[place].max().item(), abs=1e-3)
    assert len(logprobs.tokens) == len(PROMPT) + 3


def test_a_prompt_is_scored_without_a_new_token(server) -> None:
    """As evaluation harnesses ask for the likelihood of given answers."""
    answer = server.complete(PROMPT, max_tokens=0, echo=True, logprobs=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["token_logprobs"]) == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 0


def test_a_streamed_echo_says_the_same(server) -> None:
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    whole = server.openai.completions.create(**fields).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in server.openai.completions.create(**fields, stream=True)]
    for column in ("tokens", "token_logprobs", "text_offset"):
        assert [item for chunk in chunks for item in getattr(chunk, column)] == getattr(whole, column)


def test_entries_by_token_on_both_paths(server, expected) -> None:
    choice = server.complete(PROMPT, prompt_logprobs=2)["choices"][0]
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    tokens = server.engine.tokenizer.encode(PROMPT)
    rows = expected(tokens)
    for place, token in enumerate(tokens[1:]):
        entry = entries[place][str(token)]
        assert entry["decoded_token"] == PROMPT[place + 1]
        assert entry["logprob"] == pytest.approx(rows[place, token].item(), abs=1e-3)
        assert entry["rank"] == 1 + int((rows[place] > rows[place, token]).sum())
        assert [item["rank"] for item in entries[place].values()][-2:] in ([1, 2], [2, 1], [entry["rank"], 1])
    messages = [{"role": "user", "content": "hi"}]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=1, prompt_logprobs=0).json()
    rendered = server.post("/tokenize", messages=messages).json()["tokens"]
    assert [next(iter(entry)) for entry in chat["prompt_logprobs"][1:]] == [str(token) for token in rendered[1:]]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


def test_choices_of_one_context_are_scored_from_where_they_part(own) -> None:
    """Multiple choice: the context is computed and scored once, and scores are the same bits as without the cache."""
    answers = [" of a plant", " of a tower", " metal"]
    ask = {"max_tokens": 0, "echo": True, "logprobs": 1}
    alone = []
    for text in answers:
        own.http.post("/reset_prefix_cache")
        alone.append(own.complete(PROMPT + text, **ask)["choices"][0]["logprobs"])
    own.http.post("/reset_prefix_cache")
    together = [own.complete(PROMPT + text, **ask) for text in answers]
    assert [answer["choices"][0]["logprobs"] for answer in together] == alone
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in together]
    assert cached == [0, len(PROMPT) + len(" of a ") - 1, len(PROMPT) + len(" ") - 1]


def test_several_prompts_and_samples_keep_their_scores_apart(server) -> None:
    prompts = [PROMPT, PROMPT[:9], "x"]
    choices = server.complete(prompts, n=2, max_tokens=2, temperature=1, seed=1, echo=True, logprobs=0)["choices"]
    for index, choice in enumerate(choices):
        prompt = prompts[index // 2]
        assert choice["logprobs"]["tokens"][: len(prompt)] == list(prompt)
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 2


def test_entries_cannot_be_streamed(server) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, prompt_logprobs=1, stream=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"
