"""What one edited message is taken for."""

from __future__ import annotations

import pytest

from caudex.analysis.breakers.edits import edit_kind


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("I am mia_li_3668, and I fly on May 20th.", "I am mia_li_####, and I fly on May ##th.", "history_rewritten"),
        ("My card ends in 4f9a2c81.", "My card ends in ********.", "history_rewritten"),
        ("(request 9b2f61c07ae4d853)", "(request c41a7d93e05b2f68)", "request_id"),
        ("It is 10:31:07. When do I fly?", "It is 10:31:18. When do I fly?", "clock"),
        ("When do  I fly? ", "When do I fly?", "whitespace_drift"),
    ],
)
def test_kinds_of_edits(before: str, after: str, kind: str) -> None:
    assert edit_kind({"role": "user", "content": before}, {"role": "user", "content": after}) == kind
