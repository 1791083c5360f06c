"""A slow, obvious twin of paged attention, and random ragged batches to hold the kernels to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from caudex.engine.cpu import KvPool, ThreadPool

THREADS = ThreadPool(2)


@dataclass
class Prompt:
    """One sequence with its keys, values and queries: [tokens, heads, head_dim] each."""

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor

    def __len__(self) -> int:
        return len(self.key)


def random_prompt(
    num_tokens: int, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator
) -> Prompt:
    def rows(heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, head_dim, generator=generator).to(dtype)

    return Prompt(rows(kv_heads), rows(kv_heads), rows(query_heads))


def reference(prompt: Prompt, scale: float) -> torch.Tensor:
    """Causal attention over a whole prompt in float64: [tokens, query heads, head_dim]."""
    key, value, query = prompt.key.double(), prompt.value.double(), prompt.query.double()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores.masked_fill_(torch.ones(len(prompt), len(prompt)).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@dataclass
class Part:
    """Tokens [start, end) of a prompt that a step computes, and the blocks the prompt lives in."""

    prompt: Prompt
    start: int
    end: int
    block_table: np.ndarray


def run_step(pool: KvPool, parts: list[Part], layer: int = 0, scale: float = 0.3) -> list[torch.Tensor]:
    """Write and attend one packed step; returns each part's output rows."""
    batch = pool.batch(
        [part.block_table for part in parts],
        np.array([part.end - part.start for part in parts], dtype=np.int32),
        np.array([part.end for part in parts], dtype=np.int32),
        num_query_heads=parts[0].prompt.query.shape[1],
    )

    def packed(name: str) -> torch.Tensor:
        return torch.cat([getattr(part.prompt, name)[part.start : part.end] for part in parts])

    pool.write(layer, packed("key"), packed("value"), batch)
    output = pool.attend(layer, packed("query"), batch, scale)
    return list(output.split([part.end - part.start for part in parts]))


def new_pool(
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    num_layers: int = 1,
    quantized: bool = False,
    threads: ThreadPool = THREADS,
    isa: str = "auto",
) -> KvPool:
    return KvPool(
        num_layers, num_blocks, block_size, kv_heads, head_dim, dtype, quantized=quantized, threads=threads, isa=isa
    )


def blocks_for(num_tokens: int, block_size: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + -(-num_tokens // block_size), dtype=np.int32)
