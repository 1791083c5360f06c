"""`caudex bench` and `caudex demo` against real servers with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from caudex.bench.local import LocalServer, caudex_command, free_port, running
from caudex.bench.player import Scale
from caudex.bench.scenes import SCENES
from caudex.cli import main

OPTIONS = ("--num-blocks", "4000", "--num-threads", "1")
SMALL = (
    "--questions", "6", "--document-tokens", "100", "--documents", "2", "--samples", "2",
    "--sessions", "2", "--turns", "3", "--system-tokens", "60",
    "--streams", "3", "--decode-tokens", "6", "--answer-tokens", "4",
)  # fmt: skip


@pytest.fixture(scope="module")
def local(long_model_directory: Path) -> Iterator[LocalServer]:
    port = free_port()
    with running(caudex_command(["--model", str(long_model_directory), *OPTIONS], port), port) as server:
        yield server


def test_all_scenes_are_measured_cold_and_warm(local: LocalServer, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    scenes = [option for name in SCENES for option in ("--scene", name)]
    result = CliRunner().invoke(main, ["bench", local.url, *SMALL, *scenes, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text())
    runs = {(run["scene"], run["cold_prompts"]): run for run in figures["scenes"]}
    assert set(runs) == {(name, cold) for name in SCENES for cold in (True, False)}
    assert all(run["errors"] == 0 for run in runs.values())
    scale = Scale(**figures["scale"])
    assert all(run["requests"] == SCENES[run["scene"]].count(scale) for run in runs.values())
    assert runs["document", False]["requests"] == 6
    assert runs["conversation", False]["requests"] == 6
    assert runs["document", False]["hit_rate"] > 0.5
    assert runs["document", True]["hit_rate"] < 0.05
    for name in SCENES:
        assert name in result.output


def test_repeats_never_hit_each_other(local: LocalServer, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ["bench", local.url, *SMALL, "--scene", "decode", "--repeats", "3", "--no-cold", "--json", str(file)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    (run,) = json.loads(file.read_text())["scenes"]
    assert run["requests"] == 9
    assert run["hit_rate"] < 0.2


def test_a_server_that_is_not_there_is_said_in_a_sentence() -> None:
    result = CliRunner().invoke(main, ["bench", f"http://127.0.0.1:{free_port()}"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: http://127.0.0.1")


def test_a_wrong_model_is_said_in_a_sentence(local: LocalServer) -> None:
    result = CliRunner().invoke(main, ["bench", local.url, "--model", "gpt-99"])
    assert result.exit_code == 1
    assert "gpt-99" in result.output


def test_a_server_that_cannot_start_is_said_with_its_own_words() -> None:
    port = free_port()
    with (
        pytest.raises(RuntimeError, match="no/such/model"),
        running(caudex_command(["--model", "/no/such/model.gguf"], port), port),
    ):
        pass


def test_the_servers_memory_is_known(local: LocalServer) -> None:
    assert local.startup > 0
    peak = local.peak_memory()
    assert peak is None or peak > 50 * 2**20
