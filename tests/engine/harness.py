"""Drive an engine from a test: submit, wait, collect."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from caudex.engine.config import EngineConfig
from caudex.engine.engine import Engine
from caudex.engine.types import EngineStats, GenerationRequest, RequestOutput, SamplingParams

_ids = count()
TIMEOUT = 120.0


@dataclass
class Result:
    """What came of one request; `done` is set with its last output."""

    request_id: str
    outputs: list[RequestOutput] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def take(self, output: RequestOutput) -> None:
        assert not self.done.is_set(), "an output came after the last one"
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.done.set()

    def wait(self) -> Result:
        assert self.done.wait(TIMEOUT), f"request {self.request_id} did not finish"
        return self

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def logprobs(self) -> list[Any]:
        return [logprob for output in self.outputs for logprob in output.logprobs]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]


@contextmanager
def running_engine(**settings: Any) -> Iterator[Engine]:
    """A started engine that checks every invariant when idle; its death fails the test."""
    engine = Engine.load(EngineConfig(num_threads=1, debug=True, **settings))
    engine.start()
    try:
        yield engine
        assert engine.error is None, engine.error
    finally:
        assert engine.shutdown(drain=False, timeout=TIMEOUT)
    assert engine.error is None, engine.error


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


def submit(engine: Engine, prompt: Sequence[int], sampling: SamplingParams, **others: Any) -> Result:
    result = Result(f"r{next(_ids)}")
    engine.submit(GenerationRequest(result.request_id, list(prompt), sampling, **others), result.take)
    return result


def serve(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Result]:
    """Submit all prompts at once and wait for all."""
    results = [submit(engine, prompt, sampling) for prompt in prompts]
    return [result.wait() for result in results]


def settled(engine: Engine) -> EngineStats:
    """Statistics once the last step is over; a request's last output comes a moment before."""
    deadline = time.monotonic() + TIMEOUT
    while (stats := engine.stats()).num_requests_running or stats.num_requests_waiting:
        assert time.monotonic() < deadline, "requests are left"
        time.sleep(0.001)
    return stats


def assert_nothing_leaked(engine: Engine) -> None:
    """Every block is free or cached once no request is left."""
    stats = settled(engine)
    assert stats.num_pinned_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


class Reference:
    """transformers' own greedy generation, one prompt at a time, with a memory of what it has answered."""

    def __init__(self, directory: Any, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
        self._model.generation_config.eos_token_id = None
        self._known: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The first `max_tokens` tokens after `prompt`, end tokens ignored."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < max_tokens:
            with torch.inference_mode():
                whole = self._model.generate(
                    torch.tensor([list(prompt)]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    pad_token_id=0,
                )
            known = whole[0, len(prompt) :].tolist()
            self._known[tuple(prompt)] = known
        return known[:max_tokens]

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """The log-probability of each of `tokens` after `prompt` and those before it."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        scores = logits.float().log_softmax(-1)
        return [float(scores[place, token]) for place, token in enumerate(tokens)]
