"""POST /v1/chat/completions through the official client."""

from __future__ import annotations

import pytest

from caudex.server.settings import ServerSettings

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a caudex?"}]


def chat(server, messages=MESSAGES, **fields):
    options = {"model": "tiny", "temperature": 0, "max_tokens": 12, **fields}
    return server.openai.chat.completions.create(messages=messages, **options)


def test_the_prompt_is_the_rendered_conversation(server) -> None:
    answer = chat(server, extra_body={"return_token_ids": True})
    rendered = "<role>system: Be brief.<eos><role>user: What is a caudex?<eos><role>"
    assert answer.choices[0].prompt_token_ids == server.engine.tokenizer.encode(rendered, add_special_tokens=False)
    assert answer.usage.prompt_tokens == len(answer.choices[0].prompt_token_ids)
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"


def test_streaming_gives_the_same_text_with_one_role_a_choice(server) -> None:
    whole = chat(server, n=2)
    chunks = list(chat(server, n=2, stream=True, stream_options={"include_usage": True}))
    for index in range(2):
        deltas = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert deltas[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in deltas[1:])
        assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in deltas].count(None) == len(deltas) - 1
        assert deltas[-1].finish_reason == whole.choices[index].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_second_turn_finds_the_first_one_cached(fresh_server) -> None:
    with fresh_server(ServerSettings(served_model_names=("tiny",))) as server:
        first = chat(server, max_tokens=16, extra_body={"ignore_eos": True})
        history = [
            *MESSAGES,
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And in Latin?"},
        ]
        second = chat(server, history)
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_without_a_limit_the_answer_may_fill_the_context(server) -> None:
    prompt = chat(server).usage.prompt_tokens
    answer = chat(server, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == server.engine.max_model_len
    assert answer.usage.completion_tokens == server.engine.max_model_len - prompt
    assert answer.choices[0].finish_reason == "length"


def test_max_completion_tokens_is_max_tokens(server) -> None:
    answer = chat(server, max_tokens=None, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3


def test_logprobs_list_each_tokens_bytes_and_alternatives(server) -> None:
    answer = chat(server, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert bytes(entry.bytes).decode() == entry.token


def test_text_parts_are_joined(server) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a caudex?"}]
    split = chat(server, [MESSAGES[0], {"role": "user", "content": parts}])
    joined = chat(server, [MESSAGES[0], {"role": "user", "content": "What is\na caudex?"}])
    assert split.choices[0].message.content == joined.choices[0].message.content
    assert split.usage.prompt_tokens == joined.usage.prompt_tokens


def test_tools_reach_the_template(server) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    plain = chat(server).usage.prompt_tokens
    assert chat(server, tools=[tool]).usage.prompt_tokens > plain
    assert chat(server, tools=[tool], tool_choice="none").usage.prompt_tokens == plain


def test_a_session_id_is_taken_from_body_or_header(server) -> None:
    chat(server, extra_body={"session_id": "s-1"})
    chat(server, extra_headers={"X-Session-ID": "s-1"})
