"""What the bits of KV depend on, beside its tokens: one digest of all of it."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
import xxhash

from caudex import _core
from caudex.engine.config import EngineConfig
from caudex.tiers.keys import fingerprint

TIME_ONLY = frozenset(
    {
        "num_blocks", "kv_cache_bytes", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "index", "policy",
        "sharing", "enable_prefix_caching", "kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic",
        "kv_tiers", "num_threads", "prompt_lookup_tokens", "max_overtakes", "seed", "debug",
    }
)  # fmt: skip
"""Settings that change no bit of KV. One that is not listed here takes part: at worst a block is not found."""

SEEN_OTHERWISE = frozenset({"model", "served_model_name", "chat_template", "lora_adapters"})
"""Settings that matter by the tokens or the files that they name."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.json")


def kv_fingerprint(config: EngineConfig, checkpoint: Path, kv_format: str) -> bytes:
    """32 bytes that two engines have in common only if they compute the same KV from the same tokens.

    Reads all weights once, at the speed of the disk. The compiled core takes part by its own bytes, and the libraries
    around it by their versions: who updates one of them begins with an empty tier, not with KV of other bits.
    """
    settings = {
        f"setting {field.name}": str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in TIME_ONLY | SEEN_OTHERWISE
    }
    libraries = {name: version(name) for name in ("torch", "transformers", "caudex")}
    machine = {
        "core": digest_of_files([Path(_core.__file__)]),
        "libc": "-".join(platform.libc_ver()),
        "torch kernels": torch.backends.cpu.get_cpu_capability(),
    }
    return fingerprint(
        {"weights": digest_of_folder(checkpoint), "kv format": kv_format, **settings, **libraries, **machine}
    )


def adapter_digests(folders: Mapping[str, Path]) -> dict[str, str]:
    """What each adapter adds, by its name."""
    return {name: digest_of_folder(folder) for name, folder in folders.items()}


def digest_of_folder(folder: Path) -> str:
    """A digest of the weights and settings in a folder, whatever it is called."""
    return digest_of_files(sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)))


def digest_of_files(paths: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while part := file.read(4 << 20):
                digest.update(part)
    return digest.hexdigest()
