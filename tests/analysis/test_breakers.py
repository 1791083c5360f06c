"""Each planted breaker is named first, at its place, with the right mended hit rate; clean logs stay clean."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.analysis.plants import PLANTS
from tests.analysis.plants.logs import as_prompts, as_token_ids

from caudex.analysis.analyze import analyze
from caudex.analysis.breakers import Finding, find_breakers
from caudex.analysis.corpus import Corpus
from caudex.analysis.replay import replay
from caudex.trace.bodies import parse_object
from caudex.trace.encode import PromptEncoder
from caudex.trace.log import open_log
from caudex.trace.render import RequestRenderer
from caudex.trace.request import Request
from caudex.trace.table import write_parquet
from caudex.trace.tokenizer import BytesTokenizer


def _load_mutators() -> Any:
    spec = importlib.util.spec_from_file_location("mutators", Path(__file__).with_name("mutators.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutators"] = module
    spec.loader.exec_module(module)
    return module


MUTATORS: dict[str, tuple[Any, set[str]]] = _load_mutators().MUTATORS


def requests_of(bodies: list[dict[str, Any]]) -> list[Request]:
    corpus = Corpus()
    for line, body in enumerate(bodies, start=1):
        for request in parse_object(json.loads(json.dumps(body)), line):
            corpus.add(request)
    return corpus.requests


def encoder() -> PromptEncoder:
    return PromptEncoder(BytesTokenizer(), RequestRenderer())


def breakers_of(bodies: list[dict[str, Any]]) -> list[Finding]:
    return find_breakers(requests_of(bodies), encoder(), 16)[0]


@pytest.fixture(scope="module")
def clean_rate(tau_bodies: list[dict[str, Any]]) -> float:
    return replay(requests_of(tau_bodies), encoder(), 16).hit_rate


@pytest.mark.parametrize("name", MUTATORS)
def test_a_planted_breaker_is_the_first_finding(name: str, tau_bodies: list[dict[str, Any]]) -> None:
    mutate, kinds = MUTATORS[name]
    findings = breakers_of(mutate(tau_bodies))
    assert findings, f"{name}: nothing found"
    assert findings[0].candidate.kind in kinds
    assert findings[0].tokens_lost > 0
    assert findings[0].place.description
    assert len({example.value for example in findings[0].candidate.examples}) == 2


EXACTLY_UNDONE = [
    "clock_in_the_middle", "clock_at_the_end", "epoch_at_the_head", "clock_in_a_tool", "clock_in_history",
    "uuid_at_the_head", "nonce_in_the_middle", "counter", "session_id_head", "user_name_middle", "tools_shuffled",
    "tool_keys_shuffled", "tools_chosen_by_request", "history_truncated", "history_summarized",
    "tool_results_cleared", "history_respaced", "arguments_reserialized", "reasoning_content_stripped",
    "whitespace_drift", "ab_test_by_request", "salted_by_session", "lora_mix", "model_mix",
    "summary_in_system_message", "nonce_in_the_last_but_one", "salts_of_ten", "clock_at_the_head", "user_name_head",
]  # fmt: skip
"""Mutants whose mend gives back the clean log, but for the planted value itself."""


@pytest.mark.parametrize("name", EXACTLY_UNDONE)
def test_the_mended_rate_is_that_of_the_clean_log(name: str, tau_bodies: list[Any], clean_rate: float) -> None:
    mutate, _ = MUTATORS[name]
    finding = breakers_of(mutate(tau_bodies))[0]
    assert finding.hit_rate_if_mended == pytest.approx(clean_rate, abs=0.01)


def test_a_clean_log_is_clean(tau_bodies: list[Any]) -> None:
    assert breakers_of(tau_bodies) == []


def test_a_clean_log_without_sessions_is_clean(tau_bodies: list[Any]) -> None:
    assert breakers_of([{k: v for k, v in body.items() if k != "session_id"} for body in tau_bodies]) == []


def test_a_date_that_changes_once_is_not_worth_telling(tau_bodies: list[Any]) -> None:
    mutated = []
    for index, body in enumerate(tau_bodies):
        day = "2026-03-01" if index < 90 else "2026-03-02"
        system = {**body["messages"][0], "content": body["messages"][0]["content"] + f"\nToday is {day}."}
        mutated.append({**body, "messages": [system, *body["messages"][1:]]})
    kinds = [finding.candidate.kind for finding in breakers_of(mutated)]
    assert kinds in ([], ["clock"])
    for finding in breakers_of(mutated):
        assert finding.tokens_lost < 0.05 * sum(len(json.dumps(body)) / 4 for body in mutated)


SEVERAL_AT_ONCE = [
    ["clock_at_the_head", "tools_shuffled"],
    ["history_truncated", "user_name_head"],
    ["clock_at_the_head", "summary_in_system_message"],
    ["clock_in_a_tool", "salts_of_ten", "nonce_in_the_last_but_one"],
]
"""Planted together, the costliest first."""


@pytest.mark.parametrize("names", SEVERAL_AT_ONCE, ids="+".join)
def test_breakers_planted_together_are_told_in_the_order_of_their_cost(
    names: list[str], tau_bodies: list[Any], clean_rate: float
) -> None:
    broken = tau_bodies
    for name in sorted(names):
        broken = MUTATORS[name][0](broken)
    findings = breakers_of(broken)
    assert [{finding.candidate.kind} for finding in findings] == [MUTATORS[name][1] for name in names]
    for cost in ("tokens_lost", "hit_rate_if_mended"):
        values = [getattr(finding, cost) for finding in findings]
        assert values == sorted(values, reverse=True)
        assert values[0] > 0
    together = [finding.hit_rate_if_all_mended for finding in findings]
    assert together == sorted(together)
    assert together[-1] == pytest.approx(clean_rate, abs=0.01)


def test_a_breaker_behind_another_is_told_at_its_own_place(tau_bodies: list[Any]) -> None:
    clock, _ = MUTATORS["epoch_at_the_head"]
    nonce, _ = MUTATORS["nonce_in_the_middle"]
    alone = breakers_of(nonce(tau_bodies))[0]
    behind = next(found for found in breakers_of(clock(nonce(tau_bodies))) if found.candidate.kind == "request_id")
    assert alone.place.token is not None
    assert behind.place.token == pytest.approx(alone.place.token, abs=8)


def test_what_users_wrote_is_never_offered_for_rewriting(tau_bodies: list[Any]) -> None:
    for name in ("retrieved_passages_shuffled", "clock_in_history", "history_respaced"):
        mutate, _ = MUTATORS[name]
        assert all(finding.candidate.rule is None for finding in breakers_of(mutate(tau_bodies)))


def test_a_regenerated_turn_is_a_branch_and_no_breaker(tau_bodies: list[Any]) -> None:
    longest = max(tau_bodies, key=lambda body: len(body["messages"]))
    branched = []
    for index, body in enumerate(tau_bodies):
        branched.append(body)
        if index % 3 == 0 and len(body["messages"]) > 4:
            other = {"role": "user", "content": f"Actually, forget that. Let us talk about trip {index} instead."}
            branched.append({**body, "messages": [*body["messages"][:-1], other]})
    assert longest in branched
    assert breakers_of(branched) == []


LABELLED = {
    "ts_head": "clock",
    "user_name_head": "user_name",
    "tool_shuffle": "tools_reordered",
    "history_truncated": "history_truncated",
    "thinking_stripped": "reasoning_stripped",
    "cache_salt_10": "cache_salt",
}


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_mutants_of_the_trace_collection(name: str, traces: Path) -> None:
    base = analyze(traces / "mutants" / "base.openai.jsonl.gz")
    assert base.is_clean
    mutant = analyze(traces / "mutants" / f"{name}.openai.jsonl.gz")
    assert mutant.breakers[0].kind == LABELLED[name]
    assert mutant.breakers[0].hit_rate_if_mended == pytest.approx(base.infinite_hit_rate, abs=0.01)


def test_examples_in_changing_order_without_sessions(tau_bodies: list[Any]) -> None:
    mutate, kinds = MUTATORS["few_shot_turns_shuffled"]
    mutated = [{k: v for k, v in body.items() if k != "session_id"} for body in mutate(tau_bodies)]
    assert {breakers_of(mutated)[0].candidate.kind} == kinds


def _write(path: Path, bodies: list[Any]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def test_blocks_too_large_for_the_shared_part(tmp_path: Path) -> None:
    shared = "The same opening for all. " * 60
    rng = random.Random(0)
    log = _write(tmp_path / "log.jsonl", [{"prompt": f"{shared}\n{rng.randbytes(200).hex()}"} for _ in range(40)])
    usual, large = (analyze(log, block_size=size, policies=["lru"]) for size in (16, 512))
    assert usual.is_clean
    assert large.infinite_hit_rate == 0
    assert large.breakers[0].kind == "block_size_too_large"
    assert large.breakers[0].hit_rate_if_mended == pytest.approx(usual.infinite_hit_rate)


def test_round_robin_over_replicas(tau_bodies: list[Any], tmp_path: Path) -> None:
    routed = [{**body, "replica": f"pod-{number % 4}"} for number, body in enumerate(tau_bodies)]
    found = analyze(_write(tmp_path / "log.jsonl", routed), policies=["lru"])
    assert found.breakers[0].kind == "spread_over_replicas"
    assert found.breakers[0].hit_rate_if_mended == found.infinite_hit_rate
    assert found.breakers[0].details["hit_rate_as_routed"] < found.infinite_hit_rate - 0.05


PLANTED_IN_PROMPTS = {
    "clock": lambda number, text: f"Time: 10:{number // 60:02d}:{number % 60:02d}\n{text}",
    "request_id": lambda number, text: f"Request {0x9E3779B97F4A7C15 * (number + 1) % 2**64:016x}\n{text}",
}


@pytest.mark.parametrize("kind", PLANTED_IN_PROMPTS)
def test_plain_prompts(kind: str, tau_bodies: list[Any], tmp_path: Path) -> None:
    texts = ["\n\n".join(m.get("content") or "-" for m in body["messages"]) for body in tau_bodies]
    clean = analyze(_write(tmp_path / "clean.jsonl", [{"prompt": text} for text in texts]), policies=["lru"])
    assert clean.is_clean
    planted = [{"prompt": PLANTED_IN_PROMPTS[kind](number, text)} for number, text in enumerate(texts)]
    found = analyze(_write(tmp_path / "planted.jsonl", planted), policies=["lru"])
    assert found.breakers[0].kind == kind
    assert found.breakers[0].hit_rate_if_mended == pytest.approx(clean.infinite_hit_rate, abs=0.02)


def _with_system_repeated(bodies: list[Any], times: int) -> list[Any]:
    return [
        {**body, "messages": [{**system, "content": system["content"] * times}, *turns]}
        for body in bodies
        for system, *turns in [body["messages"]]
    ]


@pytest.mark.parametrize(
    ("name", "times"),
    [("clock_at_the_end", 1), ("user_name_at_the_end", 1), ("clock_at_the_end", 2), ("nonce_at_the_end", 2)],
)
def test_values_deep_in_a_plain_prompt_are_mended_across_conversations(
    name: str, times: int, tau_bodies: list[Any], tmp_path: Path
) -> None:
    """6,100 characters of policy come first, or 12,300, which is behind what is compared as a template; tools after."""
    bodies = _with_system_repeated(tau_bodies, times)
    clean = analyze(_write(tmp_path / "clean.jsonl", as_prompts(bodies)), policies=["lru"])
    assert clean.is_clean
    mutate, kinds = MUTATORS[name]
    found = analyze(_write(tmp_path / "planted.jsonl", as_prompts(mutate(bodies))), policies=["lru"])
    assert {found.breakers[0].kind} == kinds
    assert found.breakers[0].hit_rate_if_mended == pytest.approx(clean.infinite_hit_rate, abs=0.005)


def _as_prompts(bodies: list[dict[str, Any]]) -> list[str]:
    return ["\n\n".join(m.get("content") or "-" for m in body["messages"]) for body in bodies]


def _last_characters(bodies: list[dict[str, Any]], mark: str) -> list[str]:
    """Prompts whose history is cut, in the middle of whatever stands there, to its last 1,500 characters."""
    cut = []
    for body, text in zip(bodies, _as_prompts(bodies), strict=True):
        system = body["messages"][0]["content"] + "\n\n"
        history = text.removeprefix(system)
        cut.append(system + (history if len(history) <= 1500 else mark + history[-1500:]))
    return cut


@pytest.mark.parametrize("with_sessions", [True, False])
@pytest.mark.parametrize("mark", ["", "...", "[Earlier messages omitted]\n\n", None])
def test_plain_prompts_with_their_history_cut(
    mark: str | None, with_sessions: bool, tau_bodies: list[dict[str, Any]], tmp_path: Path
) -> None:
    """`mark` None drops whole turns."""
    truncate, _ = MUTATORS["history_truncated"]
    prompts = _as_prompts(truncate(tau_bodies)) if mark is None else _last_characters(tau_bodies, mark)
    rows = [
        {"prompt": prompt, **({"session_id": body["session_id"]} if with_sessions else {})}
        for prompt, body in zip(prompts, tau_bodies, strict=True)
    ]
    found = analyze(_write(tmp_path / "log.jsonl", rows), policies=["lru"])
    assert found.breakers[0].kind == "history_truncated"
    assert found.breakers[0].hit_rate_if_mended > found.infinite_hit_rate + 0.02


def test_plain_prompts_summarised(tau_bodies: list[dict[str, Any]], tmp_path: Path) -> None:
    summarize, _ = MUTATORS["history_summarized"]
    rows = [{"prompt": prompt} for prompt in _as_prompts(summarize(tau_bodies))]
    found = analyze(_write(tmp_path / "log.jsonl", rows), policies=["lru"])
    assert found.breakers[0].kind == "history_summarized"


def test_token_ids_alone_show_where_requests_diverge(tau_bodies: list[Any], tmp_path: Path) -> None:
    numbers: dict[int, int] = {}
    encoded = [array.tolist() for array in encoder().encode(requests_of(tau_bodies))]
    tokens = [[numbers.setdefault(token, 5000 + len(numbers)) for token in prompt] for prompt in encoded]
    sessions = [body["session_id"] for body in tau_bodies]

    def log(name: str, prompts: list[list[int]]) -> Path:
        rows = [{"prompt_token_ids": p, "session_id": s} for p, s in zip(prompts, sessions, strict=True)]
        return _write(tmp_path / name, rows)

    clean = analyze(log("clean.jsonl", tokens), policies=["lru"])
    assert clean.is_clean
    planted = [[1, 2, 3, 1000 + number, *prompt] for number, prompt in enumerate(tokens)]
    found = analyze(log("planted.jsonl", planted), policies=["lru"])
    assert found.breakers[0].kind == "varying_value"
    assert found.breakers[0].where.token == 3
    assert {example.value for example in found.breakers[0].examples} <= {str(1000 + n) for n in range(100)}
    assert found.breakers[0].hit_rate_if_mended == pytest.approx(clean.infinite_hit_rate, abs=0.02)


@pytest.mark.parametrize("column", [pa.large_list(pa.int32()), pa.list_(pa.int64())])
def test_a_trace_of_token_ids_is_searched_as_its_log_is(column: Any, tau_bodies: list[Any], tmp_path: Path) -> None:
    planted = as_token_ids(PLANTS["traceparent"].mutate(tau_bodies))
    log = _write(tmp_path / "log.jsonl", planted)
    converted = tmp_path / "trace.parquet"
    opened = open_log(log)
    write_parquet(converted, opened.batches, opened.schema)
    trace = pq.read_table(converted)
    pq.write_table(trace.set_column(10, "token_ids", trace["token_ids"].cast(column)), converted)
    expected, found = (analyze(path, policies=["lru"]).to_dict() for path in (log, converted))
    assert expected["breakers"][0]["where"]["token"] == found["breakers"][0]["where"]["token"] is not None
    for report in ("breakers", "breakers_searched", "mended", "prefixes"):
        assert found[report] == expected[report]


@pytest.mark.parametrize("fixed_tokens", [100, 800])
def test_a_token_that_each_session_keeps_at_the_head(fixed_tokens: int, tmp_path: Path) -> None:
    """The fixed part may be short beside the conversations, and sessions are interleaved."""
    rng = random.Random(1)
    fixed = [rng.randrange(5000, 9000) for _ in range(fixed_tokens)]
    histories: dict[int, list[int]] = {session: [] for session in range(12)}
    order = rng.sample([*histories] * 6, 72)
    clean, planted = [], []
    for session in order:
        histories[session] += [rng.randrange(100, 4000) for _ in range(rng.randrange(80, 140))]
        prompt = [*fixed, *histories[session]]
        clean.append({"prompt_token_ids": prompt, "session_id": f"s{session}"})
        planted.append({"prompt_token_ids": [1, 2, 9100 + session, *prompt], "session_id": f"s{session}"})
    without = analyze(_write(tmp_path / "clean.jsonl", clean), policies=["lru"])
    assert without.is_clean
    found = analyze(_write(tmp_path / "planted.jsonl", planted), policies=["lru"])
    assert found.breakers[0].where.token == 2
    assert found.breakers[0].hit_rate_if_mended == pytest.approx(without.infinite_hit_rate, abs=0.02)
