"""Differences of texts."""

from __future__ import annotations

from caudex.analysis.align import Span, differences


def test_a_changed_word_is_one_span() -> None:
    assert differences("the deep blue sea is wide", "the deep green sea is wide") == [Span(9, 13, 9, 14)]


def test_words_repeated_over_and_over_are_one_span() -> None:
    """difflib would look at every pair of equal ones again for each piece that it finds."""
    a, b = "0.123" * 130, "0.456" * 130
    (span,) = differences(a, b)
    assert (a[: span.a_start], b[: span.b_start]) == ("0.", "0.")
    assert (span.a_end, span.b_end) == (len(a), len(b))
