"""Tool calls: read from text in any pieces, and answered in OpenAI's shape."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caudex.server.tool_calls import CLOSE, OPEN, ToolCall, ToolCallReader

CALL = OPEN + '{"name": "look_up", "arguments": {"q": "x"}}' + CLOSE
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


def read(pieces: list[str]) -> tuple[str, list[tuple[str, dict]]]:
    reader = ToolCallReader()
    found = [item for piece in pieces for item in reader.feed(piece)] + reader.finish()
    said = "".join(item for item in found if isinstance(item, str))
    return said, [(item.name, json.loads(item.arguments)) for item in found if isinstance(item, ToolCall)]


@given(st.data())
def test_pieces_make_no_difference(data: st.DataObject) -> None:
    parts = st.sampled_from([CALL, "hello ", "<", "<tool", OPEN, CLOSE, "a < b", OPEN + "no json" + CLOSE, "\n"])
    text = "".join(data.draw(st.lists(parts, max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])


@pytest.mark.parametrize(
    ("text", "said", "num_calls"),
    [
        (CALL, "", 1),
        (f"I will.\n{CALL}\n{CALL}", "I will.\n\n", 2),
        ("a < b <tool", "a < b <tool", 0),
        (f"{OPEN}nonsense{CLOSE}", f"{OPEN}nonsense{CLOSE}", 0),
        (f"{OPEN}[1]{CLOSE}", f"{OPEN}[1]{CLOSE}", 0),
        (f'{OPEN}{{"name": "f"', f'{OPEN}{{"name": "f"', 0),
    ],
)
def test_nothing_is_lost(text: str, said: str, num_calls: int) -> None:
    assert read([text])[0] == said
    assert read([text])[1] == [("look_up", {"q": "x"})] * num_calls


def test_text_is_not_held_longer_than_a_tag_could_need_it() -> None:
    assert ToolCallReader().feed("Hello") == ["Hello"]


@pytest.fixture
def forced(server):
    """A chat whose answer is bound to be a call."""
    pytest.importorskip("llguidance")

    def ask(**fields):
        body = {"structured_outputs": {"choice": [f"Wait. {CALL}"]}}
        messages = [{"role": "user", "content": "look it up"}]
        return server.openai.chat.completions.create(
            model="tiny", messages=messages, max_tokens=90, extra_body=body, **fields
        )

    return ask


def test_a_call_comes_back_as_one(forced) -> None:
    choice = forced(tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Wait. "
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"q": "x"})


def test_one_call_at_a_time_where_more_are_not_wanted(server) -> None:
    pytest.importorskip("llguidance")
    for several, number in ((True, 2), (False, 1)):
        answer = server.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "look it up"}],
            max_tokens=200,
            tools=[TOOL],
            parallel_tool_calls=several,
            extra_body={"structured_outputs": {"choice": [CALL + CALL]}},
        )
        assert len(answer.choices[0].message.tool_calls) == number


def test_a_streamed_call_comes_whole_in_one_chunk(forced) -> None:
    chunks = [chunk.choices[0] for chunk in forced(tools=[TOOL], stream=True)]
    (made,) = [call for choice in chunks for call in choice.delta.tool_calls or []]
    assert (made.index, made.function.name) == (0, "look_up")
    assert "".join(choice.delta.content or "" for choice in chunks) == "Wait. "
    assert chunks[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_it_is_text(forced, fields: dict) -> None:
    choice = forced(**fields).choices[0]
    assert choice.message.content == f"Wait. {CALL}"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
