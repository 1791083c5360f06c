"""Models, health, version, tokens, keys, and figures that add up."""

from __future__ import annotations

import itertools
import json
import logging
import re
import threading

import pytest

import caudex
from caudex.engine.types import GenerationRequest, RequestOutput, SamplingParams
from caudex.server.activity import ActivityLog
from caudex.server.logs import JSONFormatter
from caudex.server.settings import ServerSettings


def samples(text: str) -> dict[str, float]:
    """Prometheus's text as `name{labels}` -> value."""
    found = re.findall(r"^([a-z0-9_:]+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    return {re.sub(r',?model_name="[^"]*",?', "", name).replace("{}", ""): float(value) for name, value in found}


def test_models_lists_every_served_name(server) -> None:
    listed = server.openai.models.list().data
    assert [model.id for model in listed] == ["tiny", "tiny-alias"]
    assert listed[0].max_model_len == server.engine.max_model_len
    assert server.openai.models.retrieve("tiny-alias").id == "tiny-alias"
    assert server.complete("hi", model="tiny-alias")["model"] == "tiny-alias"


def test_version_and_health(server) -> None:
    assert server.http.get("/version").json() == {"version": caudex.__version__}
    assert server.http.get("/health").status_code == 200


def test_health_is_503_when_the_engine_is_dead(fresh_server) -> None:
    with fresh_server() as server:
        server.engine.shutdown(drain=False)
        for answer in (server.http.get("/health"), server.post("/v1/completions", prompt="hi")):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"


def test_tokenize_and_detokenize_are_inverse(server) -> None:
    text = "naïve café — 日本"
    answer = server.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == server.engine.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == server.engine.max_model_len
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}


def test_tokenize_renders_messages(server) -> None:
    tokens = server.post("/tokenize", messages=[{"role": "user", "content": "hi"}]).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == "<role>user: hi<eos><role>"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}])
def test_tokenize_wants_one_of_prompt_and_messages(server, body: dict) -> None:
    assert server.post("/tokenize", **body).status_code == 400


@pytest.mark.parametrize("token", [-1, 10**6])
def test_detokenize_refuses_a_token_there_is_none_of(server, token: int) -> None:
    assert str(token) in server.post("/detokenize", tokens=[token]).json()["error"]["message"]


def test_a_key_guards_all_but_the_probes(fresh_server) -> None:
    with fresh_server(ServerSettings(api_keys=("secret", "other"))) as server:
        for path in ("/health", "/version", "/metrics"):
            assert server.http.get(path).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
        ):
            answer = server.http.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"Authorization": "Bearer secret"}, {"authorization": "bearer other"}, {"x-api-key": "secret"}):
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        assert server.openai.models.list().data


def test_a_full_queue_is_429(fresh_server) -> None:
    submitted, held, go_on, outputs = threading.Event(), threading.Event(), threading.Event(), itertools.count()

    def hold_the_second(_: RequestOutput) -> None:
        """By then the engine's figures are those of the first step, with two requests in the queue."""
        number = next(outputs)
        if number == 0:
            submitted.wait(30)
        elif number == 1:
            held.set()
            go_on.wait(30)

    with fresh_server(ServerSettings(max_waiting=1), max_num_seqs=1) as server:
        sampling = SamplingParams(max_tokens=3, ignore_eos=True)
        for name in ("a", "b", "c"):
            server.engine.submit(GenerationRequest(name, [1, 2], sampling), hold_the_second)
        submitted.set()
        try:
            assert held.wait(30)
            refused = server.post("/v1/completions", prompt="b")
        finally:
            go_on.set()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"


def test_request_ids_come_back(server) -> None:
    assert server.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {server.http.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert server.http.get("/health", headers={"x-request-id": "a b"}).headers["x-request-id"] != "a b"


def test_browsers_of_allowed_origins_may_call(fresh_server) -> None:
    with fresh_server(ServerSettings(allowed_origins=("https://a.example",), api_keys=("k",))) as server:
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        answer = server.http.options("/v1/completions", headers=asked)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        asked["Origin"] = "https://b.example"
        assert "access-control-allow-origin" not in server.http.options("/v1/completions", headers=asked).headers


def test_metrics_add_up(fresh_server) -> None:
    with fresh_server() as server:
        usages = [server.complete("m" * 60, max_tokens=9, ignore_eos=True)["usage"] for _ in range(3)]
        usages.append(server.complete("m" * 60, n=2, max_tokens=4, ignore_eos=True)["usage"])
        server.post("/v1/completions", prompt="")
        server.http.get("/nothing/here")
        read = samples(server.http.get("/metrics").text)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert read["caudex:generation_tokens_total"] == generated == 35
    # Samples of one prompt branch off it: it is looked up and counted once.
    prompted = sum(usage["prompt_tokens"] for usage in usages)
    assert read["caudex:prompt_tokens_total"] == read["caudex:prefix_cache_queries_total"] == prompted == 4 * 60
    assert read["caudex:prefix_cache_hits_total"] == cached == 3 * 59
    # Figures of requests are those of each choice, so what both samples were spared is in them.
    assert read["caudex:request_cached_tokens_sum"] == 4 * 59
    assert read["caudex:time_to_first_token_seconds_count"] == read["caudex:request_prompt_tokens_count"] == 5
    # Tokens of a guess that came true come together with the one before them.
    together = read["caudex:spec_decode_num_accepted_tokens_total"]
    assert 0 < together <= read["caudex:spec_decode_num_draft_tokens_total"]
    assert read["caudex:inter_token_latency_seconds_count"] == generated - 5 - together
    assert read["caudex:e2e_request_latency_seconds_count"] == 5
    assert read["caudex:request_generation_tokens_sum"] == generated
    assert read['caudex:request_success_total{finished_reason="length"}'] == 5
    assert read['caudex:http_requests_total{path="/v1/completions",status="200"}'] == 4
    assert read['caudex:http_requests_total{path="/v1/completions",status="400"}'] == 1
    assert read['caudex:http_requests_total{path="other",status="404"}'] == 1
    blocks = [read[f'caudex:kv_cache_blocks{{state="{state}"}}'] for state in ("pinned", "cached", "free")]
    assert sum(blocks) == 128
    assert blocks[0] == read["caudex:num_requests_running"] == read["caudex:kv_cache_usage_perc"] == 0


def test_metrics_under_another_prefix(fresh_server) -> None:
    with fresh_server(ServerSettings(metrics_prefix="vllm")) as server:
        text = server.http.get("/metrics").text
    assert "vllm:num_requests_waiting" in text
    assert "caudex:" not in text


def test_the_activity_line_says_what_was_done_and_is_silent_when_idle(
    fresh_server, caplog: pytest.LogCaptureFixture
) -> None:
    with fresh_server(ServerSettings(log_interval=0)) as server, caplog.at_level(logging.INFO, "caudex"):
        activity = ActivityLog(server.engine, 1.0)
        activity.write()
        assert not caplog.records
        server.complete("q" * 40, max_tokens=4)
        server.complete("q" * 40, max_tokens=4)
        activity.write()
        (record,) = caplog.records
        activity.write()
        assert len(caplog.records) == 1
    line = json.loads(JSONFormatter().format(record))
    assert line["level"] == "info"
    assert line["running"] == line["waiting"] == line["pinned_blocks"] == 0
    assert line["hit_rate_percent"] == pytest.approx(100 * 39 / 80)
    assert "prefix hit rate 48.8 %" in line["message"]
