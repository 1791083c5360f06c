"""Every refusal: OpenAI's shape, the right status, a message that names the value."""

from __future__ import annotations

import json
from http.client import HTTPConnection

import httpx
import openai
import pytest

from caudex.server.fields import NEUTRAL

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def refusal(answer: httpx.Response, status: int) -> dict:
    """The error of an answer, checked for its status and its shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    parsed = answer.json()
    assert set(parsed) == {"error"}
    error = parsed["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -1, "-1"),
        ("temperature", 1e6, "1000000"),
        ("temperature", "warm", "float"),
        ("top_p", 0, "0"),
        ("top_p", 1.5, "1.5"),
        ("top_k", -7, "-7"),
        ("min_p", 2, "2"),
        ("n", 0, "0"),
        ("n", 10**9, "1000000000"),
        ("n", "two", "int"),
        ("max_tokens", 0, "0"),
        ("max_tokens", -5, "-5"),
        ("max_tokens", 2.5, "int"),
        ("max_tokens", True, "bool"),
        ("logprobs", 1000, "1000"),
        ("seed", "x", "int"),
        ("stop", "", "empty"),
        ("stop", {"a": 1}, "object"),
        ("stop_token_ids", ["a"], "int"),
        ("stream", "yes", "bool"),
        ("stream_options", 3, "object"),
        ("cache_salt", "a/b", "a/b"),
        ("cache_salt", "", "''"),
        ("cache_salt", "s" * 129, "128"),
        ("presence_penalty", 3, "3"),
        ("frequency_penalty", -3, "-3"),
        ("repetition_penalty", 0, "0"),
        ("logit_bias", {"5": 101}, "101"),
        ("logit_bias", {"five": 1}, "logit_bias"),
        ("priority", 2**63, "priority"),
        ("priority", -(2**63), "priority"),
        ("logit_bias", [1], "object"),
        ("stop", ["x"] * 65, "65"),
        ("stop", "x" * 1025, "1025"),
        ("min_tokens", -1, "-1"),
        ("min_tokens", 17, "17"),
        ("suffix", "end", "end"),
        ("prompt_logprobs", 21, "21"),
        ("prompt_logprobs", -1, "-1"),
        ("use_beam_search", True, "True"),
        ("guided_json", {"type": "object"}, "structured_outputs"),
        ("guided_choice", ["yes", "no"], "structured_outputs"),
        ("priority", "high", "int"),
        ("session_id", 5, "str"),
    ],
)
def test_a_bad_value_is_named(server, field: str, value: object, said: str) -> None:
    error = refusal(server.post(COMPLETIONS, prompt="hi", **{field: value}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)
    assert said in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [None, [], "", {}, 7, True, [1, "a"], ["a", None], [[1], "a", 3.5], [[]], [True, False], [[["a"]]]],
)
def test_a_prompt_of_no_known_form(server, prompt: object) -> None:
    assert refusal(server.post(COMPLETIONS, prompt=prompt), 400)["param"] == "prompt"


@pytest.mark.parametrize("token", [-1, 260, 2**31, 2**70])
def test_a_token_the_model_does_not_have(server, token: int) -> None:
    assert str(token) in refusal(server.post(COMPLETIONS, prompt=[1, 2, token]), 400)["message"]
    bias = server.post(COMPLETIONS, prompt="hi", logit_bias={str(token): 1})
    assert str(token) in refusal(bias, 400)["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"text"', b"\xff\xfe", b"[" * 50_000, b'{"prompt": "a"} trailing', b'{"prompt": NaN}'],
)
def test_a_body_that_is_no_request(server, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        refusal(server.http.post(path, content=body), 400)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty"),
        ("hi", "array"),
        ([{"content": "hi"}], "role"),
        ([{"role": 3, "content": "hi"}], "3"),
        ([{"role": "user", "content": 3}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "user", "content": ["hi"]}], "text only"),
        ([{"role": "alien", "content": "hi"}], "no aliens"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 2000}}]}], "JSON"),
        ([{"role": "assistant", "tool_calls": 5}], "list"),
    ],
)
def test_messages_that_cannot_be_rendered(server, messages: object, said: str) -> None:
    assert said in refusal(server.post(CHAT, messages=messages), 400)["message"]


@pytest.mark.parametrize("name", ["tools", "messages", "self", "continue_final_message"])
def test_a_variable_that_is_a_parameter_of_the_rendering(server, name: str) -> None:
    answer = server.post(CHAT, messages=[USER], chat_template_kwargs={name: 1})
    assert name in refusal(answer, 400)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_logprobs", 3),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [1, 2]),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("truncate_prompt_tokens", 5),
        ("functions", [{"name": "f"}]),
        ("documents", [{"text": "x"}]),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_what_the_server_does_not_do_is_refused_and_not_ignored(server, field: str, value: object) -> None:
    assert refusal(server.post(CHAT, messages=[USER], **{field: value}), 400)["param"] == field


def test_what_asks_for_nothing_is_taken(server) -> None:
    """Clients send fields with their defaults."""
    neutral = {name: value for name, values in NEUTRAL.items() for value in values if name != "suffix"}
    assert server.post(CHAT, messages=[USER], max_tokens=1, **neutral).status_code == 200


def test_a_prompt_too_long_says_both_lengths(server) -> None:
    context = server.engine.max_model_len
    error = refusal(server.post(COMPLETIONS, prompt="a" * 1000), 400)
    assert error["code"] == "context_length_exceeded"
    assert "1000" in error["message"]
    assert str(context) in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_far_too_long_is_refused_by_its_beginning(server, monkeypatch, path: str) -> None:
    """Nobody waits for megabytes to be tokenised; to count them, /tokenize still does."""
    text, lengths, encode = "a" * 190_000, [], type(server.engine.tokenizer).encode
    monkeypatch.setattr(
        type(server.engine.tokenizer),
        "encode",
        lambda self, text, **kw: lengths.append(len(text)) or encode(self, text, **kw),
    )
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    error = refusal(server.post(path, **body), 400)
    assert error["code"] == "context_length_exceeded"
    assert lengths == [8 * server.engine.max_model_len]
    assert str(lengths[0]) in error["message"]
    assert server.post("/tokenize", prompt=text).json()["count"] == len(text)


def test_a_long_prompt_of_few_tokens_is_tokenised_to_its_end(server, monkeypatch) -> None:
    monkeypatch.setattr(type(server.engine.tokenizer), "encode", lambda self, text, **kw: [1] * (len(text) // 10_000))
    assert server.post(COMPLETIONS, prompt="a" * 100_000, max_tokens=1).json()["usage"]["prompt_tokens"] == 10


def test_a_prompt_and_answer_too_long_together_say_all_lengths(server) -> None:
    error = refusal(server.post(COMPLETIONS, prompt="a" * 100, max_tokens=5000), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    for length in (100, 5000, server.engine.max_model_len):
        assert str(length) in error["message"]


def test_an_unknown_model_is_404_and_names_those_there_are(server) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]}), ("/tokenize", {"prompt": "hi"})):
        error = refusal(server.post(path, model="gpt-99", **body), 404)
        assert error["code"] == "model_not_found"
        assert "gpt-99" in error["message"]
        assert "tiny" in error["message"]
    refusal(server.http.get("/v1/models/gpt-99"), 404)


def test_unknown_paths_and_methods(server) -> None:
    assert "/v1/images" in refusal(server.http.get("/v1/images"), 404)["message"]
    refusal(server.http.get(COMPLETIONS), 405)
    refusal(server.http.delete("/v1/models"), 405)


def test_a_body_too_large_is_refused_announced_or_not(server) -> None:
    body = json.dumps({"prompt": "a" * 300_000}).encode()
    refusal(server.http.post(COMPLETIONS, content=body), 413)
    refusal(server.http.post(COMPLETIONS, content=iter([body[:150_000], body[150_000:]])), 413)


def test_a_client_that_sends_all_of_a_body_too_large_before_it_reads_is_told(server) -> None:
    host = server.http.base_url
    connection = HTTPConnection(host.host, host.port or 80, timeout=30)
    connection.request("POST", COMPLETIONS, b"x" * (8 << 20))
    assert connection.getresponse().status == 413
    connection.close()


def test_a_refused_stream_keeps_its_status(server) -> None:
    refusal(server.post(COMPLETIONS, prompt="a" * 1000, stream=True), 400)


def test_the_openai_client_raises_its_own_exceptions(server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="gpt-99", prompt="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.completions.create(model="tiny", prompt="hi", temperature=-3)
    assert caught.value.param == "temperature"


def test_a_server_still_answers_after_all_that(server) -> None:
    assert server.complete("hi")["choices"][0]["finish_reason"] in ("length", "stop")
