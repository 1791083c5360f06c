"""The two other protocols: OpenAI's responses, through its client, and Anthropic's messages, event by event."""

from __future__ import annotations

import json

import openai
import pytest

QUESTION = "What is a caudex?"


def respond(server, **fields):
    return server.openai.responses.create(model="tiny", temperature=0, max_output_tokens=12, **fields)


def test_a_response_is_what_chat_says(server) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = server.openai.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
    for given in (QUESTION, messages[1:], [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]):
        response = respond(server, input=given, instructions="Be brief.")
        assert response.output_text == chat.choices[0].message.content
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.input_tokens_details.cached_tokens == chat.usage.prompt_tokens - 1


def test_a_response_streams_in_numbered_events(server) -> None:
    whole = respond(server, input=QUESTION)
    events = list(respond(server, input=QUESTION, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text


def test_what_is_not_kept_cannot_be_continued(server) -> None:
    with pytest.raises(openai.BadRequestError, match="whole conversation"):
        respond(server, input=QUESTION, previous_response_id="resp-1")
    with pytest.raises(openai.BadRequestError, match="function_call"):
        respond(server, input=[{"type": "function_call", "name": "f"}])


def message(server, **fields):
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    return server.post("/v1/messages", **(body | fields))


def test_a_message_is_what_chat_says(server) -> None:
    chat = server.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=12
    )
    answer = message(server).json()
    assert answer["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage.prompt_tokens
    assert usage["output_tokens"] == chat.usage.completion_tokens


def test_a_message_says_why_it_stopped(server) -> None:
    text = message(server, max_tokens=40).json()["content"][0]["text"]
    assert message(server, max_tokens=2).json()["stop_reason"] == "max_tokens"
    stopped = message(server, max_tokens=40, stop_sequences=[text[3:5]]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[3:5])


def test_a_message_streams_from_start_to_stop(server) -> None:
    whole = message(server).json()
    parts = message(server, stream=True).text.strip().split("\n\n")
    events = [json.loads(part.split("\ndata: ")[1]) for part in parts]
    assert [part.split("\n")[0] for part in parts] == [f"event: {event['type']}" for event in events]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_system_prompt_goes_first(server) -> None:
    plain, instructed = message(server).json(), message(server, system="Be brief.").json()
    assert sum(instructed["usage"].values()) > sum(plain["usage"].values())


@pytest.mark.parametrize("fields", [{"max_tokens": None}, {"messages": []}, {"temperature": -1}, {"max_tokens": 10**6}])
def test_a_bad_message_is_refused(server, fields: dict) -> None:
    assert message(server, **fields).status_code == 400
