"""How much KV a GPU holds beside a model."""

from __future__ import annotations

from caudex.sizing.gpus import Gpu, find_gpu
from caudex.sizing.kv_size import KvSize
from caudex.sizing.models import KNOWN_MODELS

USABLE_MEMORY = 0.90


def pool_blocks_on(gpu: Gpu | str, kv: KvSize, block_size: int) -> int | None:
    """Blocks that fit beside the model's 16-bit weights in 90 % of a GPU's memory; None where the model does not fit
    or its size is not known."""
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    known = KNOWN_MODELS.get(kv.model)
    total = known["total_parameters"] if known else kv.parameters
    if not total:
        return None
    left = USABLE_MEMORY * gpu.memory_bytes - 2 * total
    return int(left // (kv.bytes_per_cached_token * block_size)) if left > 0 else None
