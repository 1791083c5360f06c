"""A live server measured for `caudex simulate --fit`, and what is read from its metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from caudex.bench.client import Endpoint, Record, first_model, get
from caudex.bench.fit import measure_server
from caudex.bench.local import LocalServer, caudex_command, free_port, running
from caudex.bench.steps import ServerLimits, StepMeter, decode_seconds, server_limits
from caudex.cli import main

OPTIONS = ["--block-size", "16", "--num-blocks", "200", "--num-threads", "1"]
LIMITS = ["--max-num-batched-tokens", "256", "--max-num-seqs", "8"]


@pytest.fixture(scope="module")
def server(long_model_directory: Path) -> Iterator[LocalServer]:
    port = free_port()
    with running(caudex_command(["--model", str(long_model_directory), *OPTIONS, *LIMITS], port), port) as server:
        yield server


def test_what_is_measured_says_what_was_computed(server: LocalServer) -> None:
    async def measured() -> StepMeter:
        endpoint = Endpoint(server.url, await first_model(Endpoint(server.url, "")))
        meter = StepMeter(endpoint, chunk_tokens=256, budget=4.0)
        await meter.run()
        return meter

    found = asyncio.run(measured()).found
    prefills = [m for m in found if m.requests]
    cold = [m for m in prefills if m.prefill_tokens == m.prompt_tokens]
    assert len(cold) >= 3
    assert all(m.steps == -(-m.prefill_tokens // 256) for m in prefills)
    assert all(m.prefill_pairs == m.prompt_tokens * (m.prompt_tokens + 1) / 2 for m in cold)
    assert any(m.prefill_tokens < m.prompt_tokens / 2 for m in prefills)
    assert all(m.seconds > 0 for m in found)


def test_tokens_that_are_read_together_took_a_step_each() -> None:
    late = Record(first=True, gaps=[0.04, 0.0] * 16)
    assert decode_seconds([late]) == pytest.approx(0.02, rel=0.1)  # the first or the last may be cut in two


def test_limits_are_the_server_s_own(server: LocalServer) -> None:
    metrics = asyncio.run(get(Endpoint(server.url, ""), "/metrics")).decode()
    assert server_limits(metrics) == ServerLimits(3_200, 8, 256)


@pytest.mark.parametrize(
    ("metrics", "limits"),
    [
        ("", ServerLimits()),
        ('vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100"} 1.0', ServerLimits(1_600)),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0', ServerLimits()),
    ],
)
def test_limits_of_other_servers_are_read_as_far_as_told(metrics: str, limits: ServerLimits) -> None:
    assert server_limits(metrics) == limits


def test_a_server_is_fitted_and_the_command_takes_the_cost_model(server: LocalServer, tmp_path: Path) -> None:
    fitted, fit = asyncio.run(measure_server(Endpoint(server.url, ""), None, lambda share: None, budget=4.0))
    assert (fitted.capacity_tokens, fitted.max_num_seqs, fitted.max_num_batched_tokens) == (3_200, 8, 256)
    assert 0 <= fit.median_error <= fit.worst_error
    kept, trace, report = (tmp_path / name for name in ("fit.json", "trace.jsonl", "report.json"))
    kept.write_bytes(fitted.encode())
    rows = [{"timestamp": i * 1_000, "hash_ids": [0, i], "input_length": 32, "block_size": 16} for i in range(1, 9)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["simulate", str(trace), "--policy", "cost", "--replicas", "2", "--json", str(report)]
    result = CliRunner().invoke(main, [*command, "--fit", str(kept)])
    assert result.exit_code == 0, result.output
    figures = json.loads(report.read_text())
    assert figures["capacity_tokens"] == 3_200
    assert figures["policies"][0]["finished"] == 8
