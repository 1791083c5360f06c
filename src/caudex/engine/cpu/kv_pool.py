"""Paged KV memory and the attention that reads it in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from caudex import _core
from caudex.engine.cpu.batch import BatchMetadata, make_batch
from caudex.engine.cpu.threads import ThreadPool

DTYPE_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class KvPool:
    """The keys and values of every layer in `num_blocks` blocks of `block_size` token slots.

    Memory is taken from the system as blocks are first written (`num_bytes` is the most it can come to) and reads as
    zero before. A multiple of 16 for the block size lets attention read blocks where they lie; any other size is
    right but slower.

    Attention gives a row the same bits whatever else is in the batch, however the prompt was cut into chunks, and
    whichever blocks hold it: a softmax state is carried over the tokens in steps at fixed positions, and every sum
    has one order. What stale slots hold, NaN included, never matters. Decoding sequences of one batch whose block
    tables begin alike read what they share once.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: sizes; block_size is 1 to 256, head_dim up to 1024.
        dtype: torch.float32 or torch.bfloat16, of keys, values, queries and outputs.
        quantized: keep keys and values in 8 bits, one scale for each token's in each head: about half the memory of
            bfloat16. What is kept of a token depends on that token alone; every instruction set gives the same bits.
        threads: what to run on; None makes a pool of one thread for each CPU.
        isa: instruction set, from `available_isas()`; "auto" takes the best or the environment's CAUDEX_ISA.

    Raises:
        ValueError: a size, the type or the instruction set is not one that can be had.
        MemoryError: the address space for `num_blocks` cannot be had.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        quantized: bool = False,
        threads: ThreadPool | None = None,
        isa: str = "auto",
    ) -> None:
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype is {dtype}; expected torch.float32 or torch.bfloat16")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.quantized = quantized
        self.threads = threads if threads is not None else ThreadPool()
        self.native = _core.KvPool(
            num_layers, num_blocks, block_size, num_kv_heads, head_dim, DTYPE_NAMES[dtype], quantized, isa
        )
        self.attention = _core.PagedAttention(self.native, self.threads.native, isa)

    @property
    def num_bytes(self) -> int:
        return self.native.num_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers; what `export_block` gives."""
        return self.native.block_bytes

    @property
    def isa(self) -> str:
        return self.attention.isa

    @property
    def kv_format(self) -> str:
        """Two pools of one format mean the same by a block's bytes, and kernels write them in the same way."""
        sizes = f"{self.num_layers}x{self.block_size}x{self.num_kv_heads}x{self.head_dim}"
        kept = "int8" if self.quantized else DTYPE_NAMES[self.dtype]
        return f"cpu {self.isa} {DTYPE_NAMES[self.dtype]} kept as {kept} {sizes} {self.block_bytes}"

    def batch(
        self,
        block_tables: Sequence[NDArray[np.int32]],
        query_lens: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        *,
        num_query_heads: int,
    ) -> BatchMetadata:
        """Describe one step: prefills, chunks and decodes in any mixture, one packed row a new token.

        Args:
            block_tables: one contiguous int32 array a sequence, at least ceil(context_len / block_size) blocks.
            query_lens: [sequences] new tokens of each sequence in this step, 1 or more.
            context_lens: [sequences] tokens of each sequence once this step is done, the new ones included.
            num_query_heads: a multiple of the pool's KV heads.

        Raises:
            ValueError: lengths or tables do not fit each other or the pool; the message names the sequence.
        """
        return make_batch(
            block_tables,
            query_lens,
            context_lens,
            pool=self.native,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            num_query_heads=num_query_heads,
            num_threads=self.threads.num_threads,
        )

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: BatchMetadata) -> None:
        """Store the rows' keys and values in the slots their block tables give them.

        Args:
            layer: which layer's.
            key, value: [rows, KV heads, head_dim], any strides as long as the last is 1.
            batch: the step.
        """
        self._check("key", key, batch.num_rows, self.num_kv_heads)
        self._check("value", value, batch.num_rows, self.num_kv_heads)
        key_row, key_head, _ = key.stride()
        value_row, value_head, _ = value.stride()
        self.native.write(
            layer,
            key.data_ptr(),
            key_row,
            key_head,
            value.data_ptr(),
            value_row,
            value_head,
            batch.native,
            self.threads.native,
        )

    def attend(self, layer: int, query: torch.Tensor, batch: BatchMetadata, scale: float | None = None) -> torch.Tensor:
        """Causal attention of every row over its sequence's keys and values up to and including its own.

        Args:
            layer: which layer's keys and values; `write` must have stored the rows' own.
            query: [rows, query heads, head_dim], any strides as long as the last is 1.
            batch: the step.
            scale: of the scores, above 0; None is 1 / sqrt(head_dim).

        Returns:
            [rows, query heads, head_dim], contiguous.
        """
        self._check("query", query, batch.num_rows, batch.num_query_heads)
        scale = self.head_dim**-0.5 if scale is None else scale
        if not scale > 0:
            raise ValueError(f"scale is {scale}; expected a number above 0")
        output = torch.empty(query.shape, dtype=self.dtype)
        row, head, _ = query.stride()
        self.attention.run(
            layer,
            query.data_ptr(),
            row,
            head,
            output.data_ptr(),
            batch.native,
            batch.plan,
            batch.num_query_heads // self.num_kv_heads,
            scale,
        )
        return output

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy blocks whole, (source, target) each, in order; what lies past the slots wanted is never read."""
        for source, target in copies:
            self.native.copy_block(source, target)

    def export_block(self, block: int) -> bytes:
        """A block's keys and values of all layers; the bytes mean the same to any pool of the same shape and type."""
        return self.native.export_block(block)

    def import_block(self, block: int, data: bytes) -> None:
        """Put what `export_block` gave into a block.

        Raises:
            ValueError: there is no such block, or the length is not `block_bytes`.
        """
        self.native.import_block(block, data)

    def _check(self, name: str, tensor: torch.Tensor, rows: int, heads: int) -> None:
        """Raise a ValueError unless the kernels can read [rows, heads, head_dim] of the pool's type from the tensor."""
        if tensor.shape != (rows, heads, self.head_dim):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {(rows, heads, self.head_dim)}")
        if tensor.dtype != self.dtype or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; expected {self.dtype} on cpu")
        if tensor.stride(2) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(2)} along head_dim; expected 1")
