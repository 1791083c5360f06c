"""A real server on a real socket over a real engine with a tiny random model."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.types import EngineStats
from caudex.server.connection import bound_silence
from caudex.server.run import Address, draining_server, listening_socket
from caudex.server.settings import ServerSettings

torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers at `url`, and the engine behind it."""

    url: str
    engine: Engine
    http: httpx.Client
    openai: openai.OpenAI

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def settled(self, condition: Callable[[EngineStats], bool], seconds: int = 10) -> EngineStats:
        """The engine's figures once they meet a condition; fails if they do not within some seconds."""
        for _ in range(100 * seconds):
            stats = self.engine.stats()
            if condition(stats):
                return stats
            time.sleep(0.01)
        raise AssertionError(f"the engine never got there: {self.engine.stats()}")

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A greedy completion that must succeed."""
        answer = self.post("/v1/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 8, **fields})
        assert answer.status_code == 200, answer.text
        parsed: dict[str, Any] = answer.json()
        return parsed


@contextlib.contextmanager
def serving(config: EngineConfig, settings: ServerSettings | None = None) -> Iterator[Running]:
    """Load and serve a model on a free port, from a thread, until the block is left."""
    engine = Engine.load(config)
    engine.start()
    ready = threading.Event()
    with listening_socket(Address(port=0)) as listener:
        bound_silence(listener, (settings or ServerSettings()).client_timeout)
        server = draining_server(
            engine, settings or ServerSettings(), Address(port=0), listener, lambda url, name: ready.set()
        )
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert ready.wait(30), "the server did not come up"
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        key = (settings.api_keys if settings else ()) or ("none",)
        try:
            with httpx.Client(base_url=url, timeout=60) as http:
                yield Running(url, engine, http, openai.OpenAI(base_url=f"{url}/v1", api_key=key[0], max_retries=0))
        finally:
            server.should_exit = True
            thread.join(30)
            engine.shutdown(drain=False)
    assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def config(model_directory: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model_directory), num_blocks=128, block_size=8, num_threads=1, max_num_seqs=8, debug=True
    )


@pytest.fixture(scope="session")
def server(config: EngineConfig) -> Iterator[Running]:
    """One server that all tests without wishes of their own share."""
    with serving(config, ServerSettings(served_model_names=("tiny", "tiny-alias"), max_body_bytes=200_000)) as running:
        yield running


@pytest.fixture
def fresh_server(config: EngineConfig) -> Callable[..., contextlib.AbstractContextManager[Running]]:
    """A function that serves with an empty cache: fields of EngineConfig, and `settings`, may differ."""

    def make(settings: ServerSettings | None = None, **changes: Any) -> contextlib.AbstractContextManager[Running]:
        return serving(replace(config, **changes), settings)

    return make


@pytest.fixture(scope="session")
def greedy(model_directory: Path) -> Callable[[list[int], int], list[int]]:
    """transformers' own greedy continuation of a prompt, the answer that the server must give."""
    model = transformers.LlamaForCausalLM.from_pretrained(model_directory, dtype=torch.float32)

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
        )
        answer: list[int] = output[0, len(prompt) :].tolist()
        return answer

    return generate
