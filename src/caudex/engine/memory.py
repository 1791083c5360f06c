"""How large the KV pool may be."""

from __future__ import annotations

import os
from pathlib import Path

from caudex.engine.config import EngineConfig

DEFAULT_MEMORY_SHARE = 0.25
DEFAULT_MAX_BYTES = 4 << 30


def choose_num_blocks(config: EngineConfig, bytes_per_token: int) -> int:
    """Blocks in the pool: as configured, or `kv_cache_bytes` worth, or a quarter of free memory up to 4 GiB.

    Raises:
        ValueError: the memory given holds not even two blocks, or there is not so much.
    """
    block_bytes, free = bytes_per_token * config.block_size, available_memory()
    num_bytes = config.kv_cache_bytes
    if config.num_blocks is not None:
        num_bytes = config.num_blocks * block_bytes
    elif num_bytes is None:
        num_bytes = min(int(free * DEFAULT_MEMORY_SHARE), DEFAULT_MAX_BYTES)
    if num_bytes > free:
        raise ValueError(
            f"a KV pool of {_gibibytes(num_bytes)} ({num_bytes // block_bytes} blocks of {block_bytes} bytes) is asked "
            f"for, but {_gibibytes(free)} of memory are free: lower num_blocks or kv_cache_bytes"
        )
    if config.num_blocks is None and num_bytes < 2 * block_bytes:
        raise ValueError(f"{num_bytes} bytes for the KV cache are less than two blocks of {block_bytes} bytes")
    return config.num_blocks or num_bytes // block_bytes


def _gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def choose_max_model_len(config: EngineConfig, model_limit: int | None, num_blocks: int) -> int:
    """The longest sequence, prompt and output together, that both the model and the pool can take.

    Raises:
        ValueError: the configured length is more than either allows.
    """
    pool_limit = num_blocks * config.block_size
    wanted = config.max_model_len
    if wanted is None:
        return min(pool_limit, model_limit or pool_limit)
    if model_limit is not None and wanted > model_limit:
        raise ValueError(f"max_model_len is {wanted}, but the model's positions end at {model_limit}")
    if wanted > pool_limit:
        raise ValueError(
            f"max_model_len is {wanted}, but the KV pool holds {pool_limit} tokens ({num_blocks} blocks of "
            f"{config.block_size}): raise num_blocks or kv_cache_bytes, or lower max_model_len"
        )
    return wanted


def available_memory() -> int:
    """Bytes that could be allocated now without swapping, within this process's control group."""
    return min(_system_available(), _cgroup_available())


def _system_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_available() -> int:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
