from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from caudex.cli import main

TRACE = str(Path(__file__).parents[1] / "cache" / "data" / "mooncake_conversation.head.jsonl.gz")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["simulate", *arguments])
    return result.exit_code, result.output


def test_the_table_and_the_json_say_the_same(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    page = tmp_path / "report.html"
    flags = ["--policy", "round_robin,cost", "--kill", "5:0", "--json", str(report), "--html", str(page)]
    code, output = run(TRACE, "--limit", "200", *flags)
    assert code == 0
    figures = json.loads(report.read_text())["policies"]
    assert [row["policy"] for row in figures] == ["round_robin", "cost"]
    assert all(row["finished"] == 200 for row in figures)
    assert all(f"{row['hit_rate']:.1%}" in output for row in figures)
    html = page.read_text()
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
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    code, output = run(TRACE, "--limit", "5", *arguments)
    assert code == 1
    assert message in output


def test_a_broken_trace_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"hash_ids": [1], "input_length": 600}\n{"hash_ids": "x"}\n'))
    code, output = run(str(path))
    assert code == 1
    assert "line 2" in output
