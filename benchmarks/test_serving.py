"""What `serving.py` makes of what was measured."""

from __future__ import annotations

from dataclasses import replace

import serving
from caudex.bench.summary import Summary, summarize
from servers import VLLM, Caudex, Setting
from serving import PARTS, Contender, row, turns

PART = PARTS[Setting()][0]


def played(*walls: float) -> list[Summary | None]:
    return [replace(summarize("document", False, [], [wall]), ttft_p50=wall / 10) for wall in walls]


def test_every_server_is_first_in_its_turn() -> None:
    contenders = [Contender(Caudex()), Contender(VLLM())]
    order = [contender.name for _, _, contender in turns([PART], 3, contenders)]
    assert order == ["Caudex", "vLLM", "vLLM", "Caudex", "Caudex", "vLLM"]


def test_figures_are_medians_and_ratios_are_to_the_first_server() -> None:
    ours, theirs = Contender(Caudex()), Contender(VLLM())
    ours.played[PART.label], theirs.played[PART.label] = played(2.0, 1.0, 9.0), played(6.0, 5.0)
    cells = dict(zip(serving.HEADINGS[2:], row(PART.label, theirs, ours)[2:], strict=True))
    assert cells["repeats"] == "2"
    assert cells["wall (least-most)"] == "5.50 s (5.0-6.0)"
    assert row(PART.label, theirs, ours)[4] == "2.75x"
    assert row(PART.label, theirs, ours)[6] == "2.75x"


def test_a_slow_or_silent_server_plays_a_part_once() -> None:
    contender = Contender(VLLM())
    for before, done in (([], False), (played(19.0), False), (played(21.0), True), ([None], True)):
        contender.played[PART.label] = list(before)
        assert contender.is_done(PART, 20.0) is done


def test_a_server_that_gave_no_answer_is_named_in_the_table() -> None:
    ours, theirs = Contender(Caudex()), Contender(VLLM())
    ours.played[PART.label], theirs.played[PART.label] = played(2.0), [None]
    cells = row(PART.label, theirs, ours)
    assert cells[:3] == [PART.label, "vLLM", "no answer"]
    assert len(cells) == len(serving.HEADINGS)
