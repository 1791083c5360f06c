"""The notebook in examples/ runs from top to bottom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[2] / "examples" / "analyze.ipynb"


def test_the_notebook_runs(capsys: Any) -> None:
    namespace: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), namespace)
    assert namespace["analysis"].is_clean
    assert namespace["broken"].breakers[0].kind == "clock"
    printed = capsys.readouterr().out
    assert "vllm serve" in printed
    assert "A clock in the prompt" in printed
