"""Flags that are advised exist in the engines: each is held against a list that was read off the engine itself."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from caudex.analysis.flags import engine_flags
from caudex.sizing.kv_size import kv_size

KNOWN = {
    # vLLM 0.32: `vllm serve --help=all`.
    "vllm": {"--enable-prefix-caching", "--no-enable-prefix-caching", "--block-size", "--kv-cache-memory-bytes"},
    # SGLang 0.5.23: sglang/srt/arg_groups/field_order.py, whose fields are the flags' names.
    "sglang": {"--model-path", "--page-size", "--max-total-tokens", "--disable-radix-cache"},
    # TensorRT-LLM 1.x: tensorrt_llm/commands/serve.py (`--config` is its newer name), and the fields of KvCacheConfig
    # in https://nvidia.github.io/TensorRT-LLM/llm-api/reference.html
    "tensorrt-llm": {
        "--extra_llm_api_options", "kv_cache_config", "enable_block_reuse", "enable_partial_reuse", "tokens_per_block",
        "max_tokens",
    },
    # llama.cpp: `llama-server --help`.
    "llama.cpp": {"-m", "-c", "--cache-ram", "--no-cache-prompt"},
}  # fmt: skip


@pytest.mark.parametrize("enable", [True, False])
@pytest.mark.parametrize("model", [None, "Llama-3.1-8B"])
def test_flags_are_ones_that_the_engines_have(enable: bool, model: str | None) -> None:
    flags = engine_flags(enable, 16, 32_000, None if model is None else kv_size(model))
    assert flags.keys() == KNOWN.keys()
    for engine, line in flags.items():
        arguments = line.split("#", 1)[0].removeprefix("python -m ")
        named = set(re.findall(r"(?<=\s)--?[a-z][\w-]*", arguments)) | set(re.findall(r"(\w+):(?=\s)", line))
        named -= {"yaml"}
        assert named, line
        assert named <= KNOWN[engine], engine


@pytest.mark.parametrize(("engine", "help_flags"), [("vllm", ["serve", "--help=all"]), ("llama-server", ["--help"])])
def test_an_engine_that_is_installed_lists_the_flags(engine: str, help_flags: list[str]) -> None:
    program = shutil.which(engine)
    if program is None:
        pytest.skip(f"no {engine} on the path")
    told = subprocess.run([program, *help_flags], capture_output=True, text=True, timeout=300).stdout
    listed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", told))
    assert KNOWN["llama.cpp" if engine == "llama-server" else engine] <= listed


def test_sizes_are_those_decided() -> None:
    flags = engine_flags(True, 48, 1_000, kv_size("Llama-3.1-8B"))
    assert "--kv-cache-memory-bytes 131072000" in flags["vllm"]
    assert "--cache-ram 125" in flags["llama.cpp"]
    assert "tokens_per_block: 64" in flags["tensorrt-llm"]
