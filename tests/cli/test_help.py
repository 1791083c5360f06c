"""The command line before any command does its work: quick, grouped, and configurable from the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from caudex.cli import COMMANDS, main
from caudex.cli.options import ByteSize

HEAVY = ("torch", "transformers", "starlette", "uvicorn")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom caudex.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.strip() == "[]"


@pytest.mark.parametrize("arguments", [["analyze", "-"], ["trace", "head", "-"]])
def test_a_missing_library_is_said_in_a_line(arguments: list[str]) -> None:
    code = f"import sys\nsys.modules['pyarrow'] = None\nfrom caudex.cli import main\nmain({arguments!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "Error: logs are kept in Arrow tables: pip install 'caudex[analyze]'\n"


def test_kv_size_needs_no_library_for_logs() -> None:
    code = "import sys\nsys.modules['pyarrow'] = None\nfrom caudex.cli import main\nmain(['kv-size', 'Llama-2-70B'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "320" in ended.stdout


def test_every_command_has_help() -> None:
    for name in COMMANDS:
        shown = CliRunner().invoke(main, [name, "--help"])
        assert shown.exit_code == 0, shown.output
        assert shown.output.startswith("Usage:")


def test_options_are_grouped_in_order() -> None:
    shown = CliRunner().invoke(main, ["serve", "--help"]).output
    places = [shown.index(f"\n{heading}:\n") for heading in ("Model", "HTTP", "KV cache", "Batching")]
    assert places == sorted(places)


def test_an_option_comes_from_the_environment() -> None:
    result = CliRunner().invoke(main, ["serve"], env={"CAUDEX_BLOCK_SIZE": "zero"})
    assert result.exit_code == 2
    assert "zero" in result.output
    assert "block-size" in result.output


def test_a_bad_setting_is_named() -> None:
    result = CliRunner().invoke(main, ["serve", "--port", "0", "--max-num-batched-tokens", "3"])
    assert result.exit_code == 1
    assert "max_num_batched_tokens" in result.output


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("1K", 1024), ("2GiB", 2 * 2**30), ("1.5 mb", 3 * 2**19), ("512M", 512 * 2**20)],
)
def test_sizes(text: str, size: int) -> None:
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "many", "-5", "5 X", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(Exception, match="not a size"):
        ByteSize().convert(text, None, None)


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (["law"], "'law' is not NAME=FOLDER"),
        (["=."], "'=.' is not NAME=FOLDER"),
        (["law=/no/such/folder"], "there is no folder /no/such/folder for 'law'"),
        (["law=.", "verse=.", "law=."], "two adapters are named 'law'"),
    ],
)
def test_a_mistaken_adapter_is_said_before_anything_is_loaded(adapters: list[str], message: str) -> None:
    arguments = [word for adapter in adapters for word in ("--lora-adapter", adapter)]
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 2
    assert f"Invalid value for --lora-adapter: {message}" in result.output
