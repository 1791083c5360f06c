"""What a server computed is found by the next one: over its own restarts, and by replicas that share a Valkey."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from caudex.engine.config import EngineConfig
from caudex.server.settings import ServerSettings
from caudex.tiers.stack import TierStack

from ..tiers.conftest import ValkeyServer, valkey
from .conftest import Running, serving
from .test_process import process

__all__ = ["valkey"]

BODY = {"prompt": "the same beginning of every request, " * 9, "max_tokens": 12, "temperature": 0, "logprobs": 3}
WHOLE = 328  # Of 333 tokens, 41 blocks of 8 besides the one whose last token is computed.


@pytest.fixture(autouse=True)
def always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """This model computes faster than any store answers; what is not measured is always asked."""
    monkeypatch.setattr(TierStack, "note_computed", lambda *_: None)


def complete(url: str, **fields: Any) -> tuple[int, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["usage"]["prompt_tokens_details"]["cached_tokens"], body["choices"]


@contextlib.contextmanager
def replica(model: Path, *stores: str) -> Iterator[str]:
    options = [word for store in stores for word in ("--kv-tier", store)]
    with process(model, "--block-size", "8", *options) as (running, url):
        yield url
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
        assert running.stderr is not None
        said = running.stderr.read()
        assert "Traceback" not in said
        assert "leaked" not in said, "the engine was let go of before the interpreter ended"


def test_a_restarted_server_answers_from_its_disk(model_directory: Path, tmp_path: Path) -> None:
    with replica(model_directory, f"disk:{tmp_path}/kv,size=1G") as url:
        cached, first = complete(url)
        assert cached == 0
    with replica(model_directory, f"disk:{tmp_path}/kv,size=1G") as url:
        assert complete(url) == (WHOLE, first)
        metrics = httpx.get(f"{url}/metrics").text
        assert value(metrics, "external_prefix_cache_hits_total") == WHOLE
        assert value(metrics, "kv_tier_blocks_total", 'outcome="hit"') == WHOLE / 8
        assert value(metrics, "kv_tier_bytes_total", 'direction="read"') > 0


def test_replicas_share_a_valkey_that_may_die(config: EngineConfig, valkey: ValkeyServer) -> None:
    config = replace(config, kv_tiers=(valkey.url,))
    with serving(config) as one, serving(config) as two:
        _, first = complete(one.url)
        while one.stats().kv_tiers[0].written < WHOLE / config.block_size:
            time.sleep(0.01)
        assert complete(two.url) == (WHOLE, first)
        forget(two)
        valkey.process.send_signal(signal.SIGSTOP)
        assert complete(two.url) == (0, first), "a server that is frozen"
        forget(two)
        valkey.kill()
        assert complete(two.url) == (0, first), "a server that is gone"
        assert two.stats().kv_tiers[0].read_errors > 0


def forget(server: Running) -> None:
    """Empty a server's pool; what it has stored is kept."""
    server.post("/reset_prefix_cache")
    server.settled(lambda stats: stats.num_cached_blocks == 0)


def test_a_key_is_the_same_tenant_everywhere_and_no_other(config: EngineConfig, tmp_path: Path) -> None:
    config = replace(config, kv_tiers=(f"disk:{tmp_path}/kv",))

    def cached(running: Running, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        answer = running.http.post("/v1/completions", json=BODY, headers=headers).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    with serving(config, ServerSettings(api_keys=("one", "two"))) as running:
        assert cached(running, "one") == 0
    with serving(config, ServerSettings(api_keys=("three", "two", "one"))) as running:
        assert [cached(running, key) for key in ("three", "two", "one")] == [0, 0, WHOLE]


def test_a_tier_that_is_none_is_told_in_a_line(model_directory: Path) -> None:
    for store, problem in (
        ("disc:/tmp", "'disc:/tmp' is no KV tier; expected disk:PATH"),
        ("disk:/proc/kv", "KV blocks cannot be kept in /proc/kv"),
    ):
        command = [sys.executable, "-m", "caudex.cli", "serve", "--model", str(model_directory), "--kv-tier", store]
        ended = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 1
        assert problem in ended.stderr
        assert "Traceback" not in ended.stderr


def value(metrics: str, name: str, labels: str = "") -> float:
    """The value of the first series of this name whose labels have `labels`."""
    found = re.search(rf"^caudex:{name}{{[^}}]*{re.escape(labels)}[^}}]*}} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, (name, labels, metrics)
    return float(found[1])
