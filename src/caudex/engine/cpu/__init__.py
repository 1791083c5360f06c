"""The compiled CPU kernels behind PyTorch tensors: KV pool, paged attention, packed products, fused models.

Everything here gives a token the same bits whatever it shares a batch with, however its prompt was cut into chunks and
wherever its keys and values lie; so results do not depend on what was cached. Nothing here schedules, or knows of the
prefix cache.
"""

from caudex.engine.cpu.batch import BatchMetadata
from caudex.engine.cpu.checkpoint import CheckpointWeights
from caudex.engine.cpu.kv_pool import KvPool
from caudex.engine.cpu.linear import PackedLinear, QuantizedBits, pack_linear_layers, weight_by_output
from caudex.engine.cpu.llama import LlamaRunner, head_size, weight_shapes, why_unsupported
from caudex.engine.cpu.norm import compile_norms
from caudex.engine.cpu.threads import ThreadPool, available_isas

__all__ = [
    "BatchMetadata",
    "CheckpointWeights",
    "KvPool",
    "LlamaRunner",
    "PackedLinear",
    "QuantizedBits",
    "ThreadPool",
    "available_isas",
    "compile_norms",
    "head_size",
    "pack_linear_layers",
    "weight_by_output",
    "weight_shapes",
    "why_unsupported",
]
