"""What the README shows runs, and says what it says it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_library_in_ten_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "PrefixCache" in code]
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == "1999"


def test_every_command_is_told_of() -> None:
    from caudex.cli import COMMANDS

    told = set(re.findall(r"caudex ([a-z-]+)", README)) | {"demo"}
    assert set(COMMANDS) <= told


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/server.md", "docs/bench.md", "docs/tiers.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).exists(), link
