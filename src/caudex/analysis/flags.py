"""The decision as command lines of the engines people run."""

from __future__ import annotations

from caudex.sizing.kv_size import KvSize
from caudex.sizing.models import hub_id

SMALLEST_VLLM_BLOCK = 16


def engine_flags(enable: bool, block_size: int, capacity_tokens: int, kv: KvSize | None) -> dict[str, str]:
    """What to start vLLM, SGLang, TensorRT-LLM and llama.cpp with. Memory is given in bytes where a model is named, in
    tokens otherwise; running requests need theirs besides.

    vLLM: on by default, `--block-size`, `--kv-cache-memory-bytes`. SGLang: radix cache on by default, `--page-size`.
    TensorRT-LLM: `kv_cache_config` in the file of `--extra_llm_api_options`; blocks are powers of two. llama.cpp: one
    context shared by all slots (`-c`) and host memory for prompts that left their slot (`--cache-ram`, MiB).
    """
    model = hub_id(kv.model) if kv is not None else "MODEL"
    vllm = f"vllm serve {model}"
    sglang = f"python -m sglang.launch_server --model-path {model}"
    trtllm = f"trtllm-serve {model} --extra_llm_api_options cache.yaml  # cache.yaml: kv_cache_config: "
    llama = f"llama-server -m {model.rsplit('/', 1)[-1]}.gguf"
    if not enable:
        return {
            "vllm": f"{vllm} --no-enable-prefix-caching",
            "sglang": f"{sglang} --disable-radix-cache",
            "tensorrt-llm": f"{trtllm}{{enable_block_reuse: false}}",
            "llama.cpp": f"{llama} --no-cache-prompt --cache-ram 0",
        }
    block = max(block_size, SMALLEST_VLLM_BLOCK)
    size, ram = "", ""
    if kv is not None:
        num_bytes = int(capacity_tokens * kv.bytes_per_cached_token)
        size, ram = f" --kv-cache-memory-bytes {num_bytes}", f" --cache-ram {max(1, num_bytes >> 20)}"
    reuse = "enable_block_reuse: true, enable_partial_reuse: true"
    blocks = f"tokens_per_block: {_power_of_two(block)}, max_tokens: {capacity_tokens}"
    return {
        "vllm": f"{vllm} --enable-prefix-caching --block-size {block}{size}",
        "sglang": f"{sglang} --page-size {block_size} --max-total-tokens {capacity_tokens}",
        "tensorrt-llm": f"{trtllm}{{{reuse}, {blocks}}}",
        "llama.cpp": f"{llama} -c {capacity_tokens}{ram}",
    }


def _power_of_two(value: int) -> int:
    """The least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()
