"""The summary fits one screen and gives the answer first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from caudex.cli import main
from caudex.trace.generate import WorkloadSettings, generate


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "chat.jsonl"
    bodies = generate({"chat": 1}, WorkloadSettings(requests=150))
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def run(*arguments: str, columns: str = "120") -> str:
    result = CliRunner().invoke(main, list(arguments), env={"COLUMNS": columns}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_answer_comes_first_and_all_fits_a_screen(log: Path) -> None:
    lines = run("analyze", str(log), "--model", "Llama-3.1-8B", "--gpu", "H100", "--replicas", "4").splitlines()
    assert len(lines) <= 40
    assert any("need not be computed" in line for line in lines[:4])
    assert any("No breaker found" in line for line in lines)


def test_a_small_terminal_shows_all_of_a_broken_log(tmp_path: Path) -> None:
    """Three breakers, a model, a GPU and replicas on 80 by 40."""
    bodies = []
    for number, body in enumerate(generate({"chat": 1, "agent": 1}, WorkloadSettings(requests=150, tenants=5))):
        system = f"It is 10:{number // 60:02d}:{number % 60:02d}. {body['messages'][0]['content']}"
        bodies.append({**body, "messages": [{"role": "system", "content": system}, *body["messages"][1:]]})
        bodies[-1]["cache_salt"] = f"t{number % 5}"
    log = tmp_path / "broken.jsonl"
    log.write_text("".join(json.dumps(body) + "\n" for body in bodies) + "{\n")
    shown = run(
        "analyze", str(log), "--model", "Llama-3.1-8B", "--gpu", "H100", "--replicas", "4", columns="80"
    ).splitlines()
    assert len(shown) <= 40
    assert max(map(len, shown)) <= 80
    assert any("[clock]" in line for line in shown)
    assert any("[cache_salt]" in line for line in shown)
    assert not any("…" in line and "%" not in line for line in shown)


def test_the_json_has_the_documented_fields(log: Path, tmp_path: Path) -> None:
    run("analyze", str(log), "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html"))
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["version"] == 1
    assert report["requests"] == 150
    assert 0 < report["infinite_hit_rate"] < 1
    assert set(report["curve"][0]) >= {"policy", "block_size", "capacity_blocks", "hit_rate"}
    assert report["breakers"] == []
    assert {row["policy"] for row in report["curve"]} >= {"lru", "clairvoyant"}
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_json_to_standard_output_is_nothing_but_json(log: Path) -> None:
    assert json.loads(run("analyze", str(log), "--no-breakers", "--json", "-"))["requests"] == 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-file"], "does not exist"),
        (["LOG", "--capacities", "lots"], "capacity is 'lots'"),
        (["LOG", "--policies", "magic"], "policy is 'magic'"),
        (["LOG", "--model", "no-model"], "no model 'no-model'"),
        (["LOG", "--gpu", "abacus"], "gpu is 'abacus'"),
        (["LOG", "--block-size", "0"], "block_size is 0"),
        (["LOG", "--tokenizer", "/nowhere/at/all"], "no tokenizer at"),
    ],
)
def test_mistakes_end_with_one_line(arguments: list[str], message: str, log: Path) -> None:
    filled = [str(log) if argument == "LOG" else argument for argument in arguments]
    result = CliRunner().invoke(main, ["analyze", *filled])
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_kv_size_prints_the_figure() -> None:
    assert "320.0 KiB a token" in run("kv-size", "Llama-2-70B")
    assert json.loads(run("kv-size", "DeepSeek-V3", "--json"))["bytes_per_cached_token"] == 70272


def test_trace_commands_round_trip(log: Path, tmp_path: Path) -> None:
    parquet, anonymous = str(tmp_path / "t.parquet"), str(tmp_path / "a.parquet")
    assert "150 requests" in run("trace", "convert", str(log), parquet)
    assert "150 requests" in run("trace", "anonymize", str(log), anonymous)
    assert "token_ids" in run("trace", "head", "-n", "1", parquet)
    assert json.loads(run("trace", "stats", "--json", anonymous))["requests"] == 150
    rates = {
        json.loads(run("analyze", path, "--no-breakers", "--json", "-"))["infinite_hit_rate"]
        for path in (str(log), parquet, anonymous)
    }
    assert len(rates) == 1
