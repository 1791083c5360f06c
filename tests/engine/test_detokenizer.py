"""Pieces of text, joined, are the text; no piece ends in half a character or in half a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from caudex.engine.tokenizer import Tokenizer

from .conftest import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@settings(max_examples=200, deadline=None)
@given(prompt=st.text(max_size=6), text=st.text(alphabet="aé€😀 �", max_size=15))
def test_pieces_are_the_text_and_never_split_a_character(prompt: str, text: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode(prompt))
    ids = tokenizer.encode(text)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="aé€😀", min_size=1, max_size=40), data=st.data())
def test_a_prompt_may_end_inside_a_character(text: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:cut])
    pieces = [detokenizer.push(token) for token in ids[cut:]]
    assert "".join(pieces) + detokenizer.flush() == text[len(tokenizer.decode(ids[:cut])) :]


def test_bytes_that_never_make_a_character_are_held_back_for_a_while_only(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("😀")[:2]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    pieces = [detokenizer.push(token) for token in half * 100 + tokenizer.encode("ab")]
    assert set("".join(pieces[:200])) == {"�"}
    assert "".join(pieces).endswith("�ab")


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert [detokenizer.push(token) for token in tokenizer.encode("a😀")[:3]] == ["a", "", ""]
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_are_found_wherever_pieces_break(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out, stop = "", None
    for piece in pieces:
        match = matcher.push(piece)
        given_out += match.text
        stop = match.stop
        if stop is not None:
            break
    text = "".join(pieces)
    if stop is None:
        assert not any(other in text for other in stops)
        assert given_out + matcher.flush() == text
    else:
        assert text.startswith(given_out + stop)
        assert not any(other in given_out for other in stops)


def test_nothing_that_may_begin_a_stop_string_is_given_out() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("one <e").text == "one "
    assert matcher.push("x").text == "<ex"
    match = matcher.push("<end> two")
    assert (match.text, match.stop) == ("", "<end>")
