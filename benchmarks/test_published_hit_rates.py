"""The hit rates published with the request logs, to the digit.

    CAUDEX_TRACES=DIR pytest benchmarks/test_published_hit_rates.py

DIR holds mooncake_conversation.jsonl.gz, mooncake_synthetic.jsonl.gz and kvct_small.jsonl.gz.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hash_traces import load
from published_hit_rates import BY_POLICY, hit_rates, published, routing_rows


def log(name: str) -> Path:
    folder = os.environ.get("CAUDEX_TRACES")
    path = Path(folder or "") / f"{name}.jsonl.gz"
    if folder is None or not path.exists():
        pytest.skip(f"set CAUDEX_TRACES to a directory with {name}.jsonl.gz")
    return path


@pytest.mark.parametrize(("name", "capacity"), BY_POLICY)
def test_hit_rates_are_the_published_ones(name: str, capacity: int) -> None:
    rates = hit_rates(load(log(name)), capacity)
    assert tuple(map(published, rates)) == BY_POLICY[name, capacity]


def test_pooled_and_split_are_as_published() -> None:
    rows = list(routing_rows(log("mooncake_conversation")))
    assert [row.name for row in rows if not row.agrees] == []
    hashed, weighed = (row for row in rows if not row.compared)
    assert abs(hashed.hit_rate - 0.300) < 0.005
    assert hashed.imbalance < 1.2
    assert abs(weighed.hit_rate - 0.298) < 0.003
    assert weighed.imbalance < 1.01
