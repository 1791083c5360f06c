from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from caudex.cli import main
from caudex.simulate.replica import Replica, StepEvents

TRACE = str(Path(__file__).parents[1] / "cache" / "data" / "mooncake_conversation.head.jsonl.gz")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["simulate", *arguments])
    return result.exit_code, result.output


def test_the_table_and_the_json_say_the_same(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    page = tmp_path / "report.html"
    flags = ["--policy", "round_robin,cost", "--kill", "5:0", "--window", "4"]
    flags += ["--json", str(report), "--html", str(page)]
    code, output = run(TRACE, "--limit", "200", *flags)
    assert code == 0
    figures = json.loads(report.read_text())["policies"]
    assert [row["policy"] for row in figures] == ["round_robin", "cost"]
    assert all(row["finished"] == 200 for row in figures)
    assert all(f"{row['hit_rate']:.1%}" in output for row in figures)
    for row in figures:
        [death] = row["deaths"]
        assert (death["time"], death["replica"]) == (5.0, 0)
        assert f"{death['before']['hit_rate']:.1%} -> {death['after']['hit_rate']:.1%}" in output
        assert 0 < death["before"]["requests"] < 200
    html = page.read_text()
    assert html.count("died at 5 s") == 4
    assert all(html.count(f">{row['policy']}<") >= 1 for row in figures)
    assert html.count("<svg") == 2
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "<script" not in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "nearest"], "nearest"),
        (["--gpu", "H99"], "H99"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--kill", "soon"], "SECONDS:REPLICA"),
        (["--model", "Llama-3.1-70B"], "weights alone"),
        (["--gpu", "H99"], "H100"),
        (["--model", "no-such-model"], "Llama-2-70B"),
        (["--kill", "nan:1"], "number of seconds"),
        (["--kill", "-5:1"], "number of seconds"),
        (["--join", "5:-1"], "begin at 0"),
        (["--rate", "nan"], "number above 0"),
        (["--speed", "inf"], "number above 0"),
        (["--rate", "1", "--speed", "2"], "one of them"),
        (["--capacity", "100"], "less than one block"),
        (["--eviction", "newest"], "newest"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "max_num_batched_tokens"),
        (["--fit", "no-such-file"], "no-such-file"),
        (["--fit", TRACE], "not a cost model"),
        (["--fit", "http://127.0.0.1:9"], "could not be measured"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    code, output = run(TRACE, "--limit", "5", *arguments)
    assert code == 1
    assert message in output


def test_numbers_out_of_range_are_refused() -> None:
    for flags in (["--replicas", "0"], ["--replicas", "1000000"], ["--rate", "-1"], ["--speed", "0"]):
        code, output = run(TRACE, *flags)
        assert code == 2
        assert flags[0] in output


def write_trace(path: Path, *rows: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(timestamp: float, *hash_ids: int, **others: int) -> dict[str, object]:
    length = {"input_length": 16 * len(hash_ids), "output_length": 4, "block_size": 16}
    return {"timestamp": timestamp, "hash_ids": hash_ids} | length | others


def simulated(tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    report = tmp_path / "report.json"
    code, output = run(*arguments, "--policy", "cost", "--json", str(report))
    assert code == 0, output
    figures: list[dict[str, object]] = json.loads(report.read_text())["policies"]
    return figures


def test_an_empty_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    code, output = run(str(path))
    assert code == 1
    assert "empty.jsonl" in output.replace("\n", "")


def test_one_request(tmp_path: Path) -> None:
    [figures] = simulated(tmp_path, write_trace(tmp_path / "one.jsonl", row(5_000.0, 1, 2)))
    assert figures["finished"] == 1
    assert figures["hit_rate"] == 0.0


def test_times_out_of_order_are_put_in_order(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", row(9_000.0, 1, 2, 3), row(0.0, 1, 2, 4), row(4_000.0, 1, 2, 5))
    [figures] = simulated(tmp_path, path, "--replicas", "1")
    assert figures["finished"] == 3
    assert figures["hit_rate"] == pytest.approx(4 / 9)


def test_a_prompt_longer_than_a_replica_is_refused_and_the_others_are_served(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", row(0.0, *range(10)), row(1.0, 20, 21))
    [figures] = simulated(tmp_path, path, "--capacity", "100")
    assert (figures["finished"], figures["refused"]) == (1, 1)


def test_a_fleet_that_dies_refuses_and_one_that_changes_later_does_not_matter(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", row(0.0, 1), row(10_000.0, 2))
    [figures] = simulated(tmp_path, path, "--replicas", "1", "--kill", "5:0", "--kill", "1e9:7")
    assert (figures["finished"], figures["refused"]) == (1, 1)
    assert figures["tpot"] is not None
    page = tmp_path / "page.html"
    [figures] = simulated(tmp_path, path, "--replicas", "1", "--kill", "0:0", "--html", str(page))
    assert "No request was finished" in page.read_text()
    assert (figures["finished"], figures["refused"], figures["hit_rate"]) == (0, 2, None)


def test_what_was_simulated_until_ctrl_c_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second policy is interrupted after some arrivals, as by a signal."""
    steps = itertools.count()
    advance = Replica.advance

    def advance_until_interrupted(self: Replica) -> StepEvents:
        if next(steps) == 900:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Replica, "advance", advance_until_interrupted)
    code, output = run(TRACE, "--limit", "200", "--policy", "round_robin,cost,prefix")
    assert code == 130
    assert "round_robin" in output
    assert "cost" in output
    assert "prefix" not in output
    assert "interrupted" in output


def test_a_broken_trace_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"hash_ids": [1], "input_length": 600}\n{"hash_ids": "x"}\n'))
    code, output = run(str(path))
    assert code == 1
    assert "line 2" in output
