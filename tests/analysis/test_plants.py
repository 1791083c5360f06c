"""Breakers of every kind, planted in generated logs: each named first, at its place, with the right mended rate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.analysis.plants import PLANTS, Body
from tests.analysis.plants.logs import FORMS, analyzed, generated, has, without_sessions

WORKLOADS = {"agent": 60, "chat": 60, "rag": 60, "chat+agent": 90}
FOUND_IN_ANY_FORM = ["iso_clock_head", "traceparent", "user_name_head", "oldest_dropped", "middle_dropped"]
IN_OTHER_FORMS = [
    *((name, form) for name in FOUND_IN_ANY_FORM for form in ("prompts", "token ids")),
    *((name, "prompts") for name in ("tools_shuffled", "tool_keys_shuffled", "tools_chosen", "plugin_in_front")),
    ("clock_in_tool_description", "prompts"),
    ("oldest_dropped_by_budget", "prompts"),
    ("think_stripped", "prompts"),
]
"""Ids do not say what is a tool or a thought, so these are named in text only."""


@pytest.fixture(scope="module")
def logs() -> dict[str, list[Body]]:
    return {mix: generated(mix, requests, seed=11) for mix, requests in WORKLOADS.items()}


@pytest.mark.parametrize("mix", WORKLOADS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sessions", [True, False])
def test_clean_logs_are_clean(mix: str, form: str, sessions: bool, logs: dict[str, list[Body]], tmp_path: Path) -> None:
    log = FORMS[form](logs[mix])
    found = analyzed(log if sessions else without_sessions(log), tmp_path / "log.jsonl")
    assert [breaker.kind for breaker in found.breakers] == []


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_breaker_is_named_first(name: str, logs: dict[str, list[Body]], tmp_path: Path) -> None:
    plant = PLANTS[name]
    log = next((log for log in logs.values() if plant.needs <= has(log)), None)
    if log is None:
        pytest.skip(f"needs {', '.join(plant.needs)}: see benchmarks/breakers.py")
    wanted = analyzed(plant.clean(log), tmp_path / "clean.jsonl").infinite_hit_rate
    found = analyzed(plant.mutate(log), tmp_path / "log.jsonl")
    if wanted - found.infinite_hit_rate < 0.005:
        return
    first = found.breakers[0]
    assert first.kind in plant.kinds
    assert re.search(plant.place, first.where.description)
    assert first.hit_rate_if_mended == pytest.approx(wanted, abs=plant.slack)
    assert {key: first.details[key] for key in plant.details} == plant.details


@pytest.mark.parametrize(("name", "form"), IN_OTHER_FORMS)
def test_it_is_found_without_messages_too(name: str, form: str, logs: dict[str, list[Body]], tmp_path: Path) -> None:
    plant, log = PLANTS[name], logs["agent"]
    clean = analyzed(FORMS[form](log), tmp_path / "clean.jsonl")
    found = analyzed(FORMS[form](plant.mutate(log)), tmp_path / "log.jsonl")
    if form == "prompts":
        assert found.breakers[0].kind in plant.kinds
    assert found.breakers[0].where.token is not None
    assert found.breakers[0].hit_rate_if_mended == pytest.approx(clean.infinite_hit_rate, abs=0.015)
