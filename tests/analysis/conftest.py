from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
TRACES = Path(os.environ.get("CAUDEX_TRACES", ROOT.parent / "shared" / "traces"))


@pytest.fixture(scope="session")
def tau_bodies() -> list[dict[str, Any]]:
    """100 requests of a real agent, clean."""
    raw = zstandard.ZstdDecompressor().stream_reader((DATA / "tau_airline_100.openai.jsonl.zst").read_bytes()).read()
    return [json.loads(line) for line in raw.splitlines()]


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of real traces, where there is one; set CAUDEX_TRACES to name another."""
    if not TRACES.is_dir():
        pytest.skip(f"no traces at {TRACES.name}/; set CAUDEX_TRACES")
    return TRACES


def read_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return [json.loads(line) for line in file]
