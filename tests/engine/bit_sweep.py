"""A hit changes nothing but time: random requests under random histories of the cache keep the bits they have alone.

    python -m tests.engine.bit_sweep --servings 20000

A round takes one model (architecture, type, with adapters or without) and some requests that ask for anything a request
may ask for, and serves each alone by an engine without a cache. Then engines with random settings serve them in bursts:
cold, cached, partly cached, evicted and computed again, computed by another, in a batch of one or sixteen, cut into any
chunks, preempted, fetched from a disk that it shares with others, beside cancelled ones, as samples that branch off one
prompt, on guesses that come true or not. Every answer must have the same tokens, log-probabilities, scores of the
prompt, text and reason to end, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from safetensors.torch import save_file

from caudex.engine.config import KvCacheDTypeName, WeightsName
from caudex.engine.cpu.llama import MODEL_TYPES
from caudex.engine.engine import Engine
from caudex.engine.types import GenerationRequest, OutputGrammar, SamplingParams

from .conftest import TINY_CONFIGS, VOCAB_SIZE, byte_tokenizer
from .harness import Result, assert_nothing_leaked, running_engine, settled
from .oracle import Answers, guessing

ARCHITECTURES = ("llama", "qwen3", "qwen2", "mistral", "gpt2", "gemma", "phi", "olmo", "granite")
ADAPTED = {*MODEL_TYPES, "gemma", "olmo", "granite"}
"""Architectures whose linear layers have the names that `save_adapter` knows."""
ADAPTERS = ("law", "verse")
GRAMMARS = (
    OutputGrammar("regex", "[a-f]{1,9}[0-9]*"),
    OutputGrammar("choice", '["yes, it is", "no", "yes"]'),
    OutputGrammar("json_schema", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 4}'),
)


@dataclass
class Case:
    """A request to be served again and again, and what came of it when it was served alone."""

    prompt: list[int]
    sampling: SamplingParams
    adapter: str | None
    bits: tuple[Any, ...] = ()


@dataclass
class Tally:
    """How many requests a sweep has served, by their circumstances."""

    servings: Counter[str] = field(default_factory=Counter)

    def note(self, engine: Engine, result: Result, num_branched: int, is_adapted: bool) -> None:
        last = result.last
        self.servings["all"] += 1
        self.servings["hit"] += last.num_cached_tokens > 0
        self.servings["part of a block hit"] += bool(last.num_cached_tokens % engine.config.block_size)
        self.servings["sample of another"] += num_branched
        for name in NUMERICS:
            self.servings[f"{name} {getattr(engine.config, name)}"] += 1
        self.servings[f"adapter with {engine.config.weights} weights"] += is_adapted


def draw_case(rng: random.Random, stems: list[list[int]], with_adapters: bool) -> Case:
    """A prompt over one of `stems`, and random wishes, each of which most requests do not have."""
    is_long = rng.random() < 0.2  # An answer; its prompt is short then, so that many run at once and outgrow the pool.
    prompt = rng.choice(stems)[: rng.randrange(1, 31 if is_long else 91)] + [rng.randrange(256)] * rng.randrange(1, 9)
    if rng.random() < 0.3:
        prompt = prompt[:60] + prompt[: rng.randrange(3, 30)]

    def sometimes(*values: Any, otherwise: Any) -> Any:
        return rng.choice(values) if rng.random() < 0.25 else otherwise

    max_tokens = rng.randrange(30, 80) if is_long else rng.randrange(1, 14)
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_k=sometimes(5, 40, otherwise=0),
        top_p=sometimes(0.5, 0.9, otherwise=1.0),
        min_p=sometimes(0.01, 0.1, otherwise=0.0),
        seed=rng.randrange(1000),
        max_tokens=max_tokens,
        min_tokens=sometimes(0, 1, max_tokens, otherwise=0),
        stop=sometimes(("a",), ("e", "th"), otherwise=()),
        stop_token_ids=sometimes((3, 4, 5), otherwise=()),
        ignore_eos=rng.random() < 0.8,
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=sometimes(0, 2, 5, otherwise=None),
        presence_penalty=sometimes(0.5, -1.0, otherwise=0.0),
        frequency_penalty=sometimes(0.7, otherwise=0.0),
        repetition_penalty=sometimes(1.3, 0.8, otherwise=1.0),
        logit_bias=sometimes({65: 5.0, 66: -9.0}, {65: 50.0, 66: 50.0, 67: 50.0}, otherwise={}),
        grammar=sometimes(*GRAMMARS, otherwise=None) if rng.random() < 0.5 else None,
    )
    return Case(prompt, sampling, rng.choice([None, *ADAPTERS]) if with_adapters else None)


NUMERICS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "weights": get_args(WeightsName),
    "kv_cache_dtype": get_args(KvCacheDTypeName),
}
"""Settings that an answer's bits depend on: every engine of a round has the same. All others change time only."""


def draw_numerics(rng: random.Random) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in NUMERICS.items()}


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Settings that change time only: a pool roomy or so small that it evicts and preempts, with any chunking."""
    block_size = rng.choice([1, 4, 7, 16, 32])
    max_num_seqs = rng.choice([1, 2, 6, 16])
    return {
        "block_size": block_size,
        "num_blocks": -(-rng.choice([130, 200, 3000]) // block_size) + 1,
        "index": rng.choice(["radix", "hash"]),
        "policy": rng.choice(["gittins", "lru"]),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + rng.choice([1, 17, 64, 500]),
        "enable_prefix_caching": rng.random() < 0.9,
        "prompt_lookup_tokens": rng.choice([0, 1, 4, 9]),
    }


def draw_guesser(rng: random.Random, cases: list[Case]) -> AbstractContextManager[None]:
    """Guesses by prompt lookup, or by an oracle that is right always, mostly or never."""
    if rng.random() < 0.4:
        return nullcontext()
    answers: Answers = defaultdict(list)
    for case in cases:
        answers[tuple(case.prompt)].append(case.bits[0])
    return guessing(answers, rng, rng.choice([0.0, 0.2, 1.0]), VOCAB_SIZE)


def submit(engine: Engine, case: Case, serial: int, sample_of: str | None = None) -> Result:
    result = Result(f"case-{serial}")
    request = GenerationRequest(
        result.request_id, case.prompt, case.sampling, adapter=case.adapter, sample_of=sample_of
    )
    engine.submit(request, result.take)
    return result


def bits_of(result: Result) -> tuple[Any, ...]:
    last = result.wait().last
    assert last.finish_reason in ("stop", "length"), last
    scores = result.outputs[0].prompt_logprobs
    return result.tokens, result.logprobs, scores, result.text, last.finish_reason, last.stop_reason


def serve_burst(engine: Engine, rng: random.Random, cases: list[Case], first: int, tally: Tally) -> int:
    """Serve some cases at once, some of them together with other samples of their prompt; the number of requests."""
    served: list[tuple[Case, Result, int]] = []
    for case in rng.sample(cases, rng.randrange(1, len(cases))):
        leader = submit(engine, case, first + len(served))
        served.append((case, leader, 0))
        same = [other for other in cases if (other.prompt, other.adapter) == (case.prompt, case.adapter)]
        for other in same if rng.random() < 0.5 else []:
            served.append((other, submit(engine, other, first + len(served), leader.request_id), 1))
        if rng.random() < 0.1:
            cancelled = submit(engine, rng.choice(cases), first + 100_000 + len(served))
            engine.abort(cancelled.request_id)
    for case, result, num_branched in served:
        assert bits_of(result) == case.bits, (case, engine.config)
        tally.note(engine, result, num_branched, case.adapter is not None)
    return len(served)


def play_bursts(engine: Engine, rng: random.Random, cases: list[Case], num_bursts: int, tally: Tally) -> None:
    serial = 0
    for _ in range(num_bursts):
        serial += serve_burst(engine, rng, cases, serial, tally)
        if rng.random() < 0.1:
            engine.reset_prefix_cache()
    assert_nothing_leaked(engine)
    stats = settled(engine)
    tally.servings["preempted"] += stats.preemptions
    tally.servings["tokens from a tier"] += stats.tier_hits
    tally.servings["guesses right"] += stats.accepted_draft_tokens
    tally.servings["guesses wrong"] += stats.draft_tokens - stats.accepted_draft_tokens


def play_round(
    rng: random.Random,
    directory: Path,
    adapters: dict[str, Path],
    tally: Tally,
    *,
    numerics: dict[str, Any],
    num_engines: int = 2,
    num_bursts: int = 4,
    share_with_tier: float = 0.5,
) -> None:
    """One model and twenty-four requests, served in some bursts by each of some engines.

    All engines of a model that have a tier have the same folder, whatever their settings, types and adapters.
    """
    stems = [[rng.randrange(256) for _ in range(90)] for _ in range(3)]
    cases = [draw_case(rng, stems, bool(adapters)) for _ in range(16)]
    for _ in range(8):
        case = rng.choice(cases)
        cases.append(replace(case, sampling=replace(case.sampling, seed=rng.randrange(1000), logprobs=1)))
    common = {
        "model": str(directory),
        "attention_backend": "cpu",
        **numerics,
        "lora_adapters": adapters,
        "max_model_len": 120,
    }
    alone = {"num_blocks": 20, "enable_prefix_caching": False, "max_num_seqs": 1, "prompt_lookup_tokens": 0}
    with running_engine(**common, **alone) as engine:
        for serial, case in enumerate(cases):
            case.bits = bits_of(submit(engine, case, serial))
    for _ in range(num_engines):
        settings = draw_settings(rng)
        with_tier = settings["enable_prefix_caching"] and rng.random() < share_with_tier
        if with_tier:
            settings["kv_tiers"] = (f"disk:{directory}-kv,size=2M",)
        for _ in range(2 if with_tier else 1):  # The second one finds what the first has left on disk.
            with draw_guesser(rng, cases), running_engine(**common, **settings) as engine:
                play_bursts(engine, rng, cases, num_bursts, tally)


def save_model(architecture: str, directory: Path) -> Path:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(TINY_CONFIGS[architecture](), dtype=torch.float32)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def save_adapter(model: Path, directory: Path, seed: int) -> Path:
    """A LoRA adapter in peft's format for some linear layers of a model of the Llama family, of any rank."""
    directory.mkdir()
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    targets = rng.sample(projections, rng.randrange(1, len(projections) + 1))
    rank = rng.choice([1, 3, 4, 17, 40])
    tensors = {}
    for name, weight in transformers.AutoModelForCausalLM.from_pretrained(model).state_dict().items():
        layer = name.removesuffix(".weight")
        if layer.endswith(tuple(targets)):
            pair = {"A": (rank, weight.shape[1]), "B": (weight.shape[0], rank)}
            for part, shape in pair.items():
                matrix = torch.randn(shape, generator=generator) * 0.4 / rank**0.5
                tensors[f"base_model.model.{layer}.lora_{part}.weight"] = matrix
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def sweep(scratch: Path, num_servings: int, seed: int, progress: Callable[[Tally], None]) -> Tally:
    """Play rounds until `num_servings` requests have been served with the right bits."""
    rng, tally = random.Random(seed), Tally()
    models = {name: save_model(name, scratch / name) for name in ARCHITECTURES}
    while tally.servings["all"] < num_servings:
        architecture = rng.choice(ARCHITECTURES)
        adapters: dict[str, Path] = {}
        if architecture in ADAPTED and rng.random() < 0.5:
            folder = scratch / f"adapters-{tally.servings['rounds']}"
            folder.mkdir()
            adapters = {
                name: save_adapter(models[architecture], folder / name, rng.randrange(1 << 30)) for name in ADAPTERS
            }
        play_round(rng, models[architecture], adapters, tally, numerics=draw_numerics(rng))
        tally.servings["rounds"] += 1
        progress(tally)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servings", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sweep(Path(scratch), options.servings, options.seed, lambda tally: print(dict(tally.servings), flush=True))


if __name__ == "__main__":
    main()
