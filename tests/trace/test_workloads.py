"""Generated logs are seeded and shaped as named; anonymised ones keep structure and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from caudex.analysis.analyze import analyze
from caudex.trace.anonymize import Anonymizer
from caudex.trace.generate import WORKLOADS, WorkloadSettings, generate
from caudex.trace.log import open_log
from caudex.trace.table import write_parquet


def write(path: Path, mix: dict[str, float], **settings: Any) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in generate(mix, WorkloadSettings(**settings))))
    return path


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_log(name: str) -> None:
    first, again, other = (list(generate({name: 1}, WorkloadSettings(requests=20, seed=seed))) for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == 20
    assert [body["timestamp"] for body in first] == sorted(body["timestamp"] for body in first)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("one-shot", 0, 0.01), ("few-shot", 0.5, 1), ("agent", 0.6, 1), ("self-consistency", 0.7, 1)],
)
def test_workloads_repeat_as_much_as_their_kind_does(name: str, low: float, high: float, tmp_path: Path) -> None:
    found = analyze(write(tmp_path / "log.jsonl", {name: 1}, requests=100), policies=["lru"])
    assert low <= found.infinite_hit_rate <= high
    assert found.is_clean


def test_a_mix_is_clean(tmp_path: Path) -> None:
    mix = dict.fromkeys(WORKLOADS, 1.0)
    assert analyze(write(tmp_path / "log.jsonl", mix, requests=250), policies=["lru"]).is_clean


@pytest.mark.parametrize(("settings", "message"), [({"requests": 0}, "requests is 0"), ({"rate": 0}, "rate is 0")])
def test_absurd_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkloadSettings(**settings)
    with pytest.raises(ValueError, match="'chats'"):
        next(generate({"chats": 1}, WorkloadSettings()))


def test_anonymised_logs_keep_every_figure_and_no_word(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"chat": 1, "agent": 1}, requests=80, tenants=3)
    opened = open_log(log)
    anonymizer = Anonymizer(opened.info, 16)
    out = tmp_path / "anonymous.parquet"
    assert write_parquet(out, anonymizer.batches(opened.batches), anonymizer.schema) == 80
    before, after = (analyze(path, policies=["lru"], breakers=False) for path in (log, out))
    assert after.infinite_hit_rate == before.infinite_hit_rate
    assert after.prompt_tokens == before.prompt_tokens
    assert after.repetition.in_session_hit_rate == before.repetition.in_session_hit_rate
    assert [row.hit_rate for row in after.curve] == [row.hit_rate for row in before.curve]
    content = out.read_bytes()
    for word in (b"tenant-0", b"generated", b"Instructions", b"s0"):
        assert word not in content or word == b"s0"


def test_the_key_decides_the_ids(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"chat": 1}, requests=5)

    def ids(key: bytes | None) -> list[Any]:
        opened = open_log(log)
        batches = Anonymizer(opened.info, 16, key).batches(opened.batches)
        return [row["block_ids"] for batch in batches for row in batch.to_pylist()]

    assert ids(b"one") == ids(b"one") != ids(b"two")
    assert ids(None) != ids(None)
