"""Breakers of every kind, planted in generated logs: each named first, at its place, with the right mended rate."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.analysis.plants import PLANTS, Body, Plant
from tests.analysis.plants.judge import LEAST_LOSS, faults
from tests.analysis.plants.logs import FORMS, analyzed, generated, has, parting_tokens, without_sessions

WORKLOADS = {"agent": 60, "chat": 60, "rag": 60, "chat+agent": 90}
FOUND_IN_ANY_FORM = ["iso_clock_head", "traceparent", "user_name_head", "oldest_dropped", "middle_dropped"]
IN_OTHER_FORMS = [
    *((name, form) for name in FOUND_IN_ANY_FORM for form in ("prompts", "token ids")),
    *((name, "prompts") for name in ("tools_shuffled", "tool_keys_shuffled", "tools_chosen", "plugin_in_front")),
    ("clock_in_tool_description", "prompts"),
    ("oldest_dropped_by_budget", "prompts"),
    ("think_stripped", "prompts"),
    *((name, "prompts") for name in ("recap_in_front", "summary_in_the_middle", "old_results_cut")),
    *((name, "token ids") for name in ("tools_shuffled", "shots_in_system", "rules_shuffled")),
    *((name, "token ids") for name in ("recap_in_front", "old_results_cut", "id_in_second_system")),
]
"""What ids say too little of (a thought, a set of tools) is named in text only."""


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
    found = faults_of(plant, "messages", log, tmp_path / "log.jsonl")
    assert not found


@pytest.mark.parametrize(("name", "form"), IN_OTHER_FORMS)
def test_it_is_found_without_messages_too(name: str, form: str, logs: dict[str, list[Body]], tmp_path: Path) -> None:
    found = faults_of(PLANTS[name], form, logs["agent"], tmp_path / "log.jsonl")
    assert found == []


def faults_of(plant: Plant, form: str, log: list[Body], path: Path) -> list[str] | None:
    """None where the plant costs too little to be found."""
    wanted = analyzed(FORMS[form](plant.clean(log)), path).infinite_hit_rate
    broken = FORMS[form](plant.mutate(log))
    found = analyzed(broken, path)
    if wanted - found.infinite_hit_rate < LEAST_LOSS:
        return None
    return faults(plant, form, wanted, found, parting_tokens(broken, path))
