"""The plain attention backend: PyTorch only, any device, one sequence at a time. The reference for every other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caudex.engine.attention import AttentionBackend, AttentionOptions, LayerAttention, LayerShape, attend_densely
from caudex.engine.batch import Int32Array, StepBatch


class TorchAttention(AttentionBackend):
    """KV as one (num_blocks * block_size, KV heads, size) tensor of keys and one of values a layer.

    It gathers a sequence's whole KV at every step of every layer: right, and slow on long contexts.
    """

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_slots = num_blocks * block_size
        self._block_size = block_size
        self._device = device
        self._keys = [
            torch.zeros(num_slots, shape.num_kv_heads, shape.key_size, dtype=dtype, device=device) for shape in layers
        ]
        self._values = [
            torch.zeros(num_slots, shape.num_kv_heads, shape.value_size, dtype=dtype, device=device) for shape in layers
        ]

    @property
    def kv_memory(self) -> TorchAttention:
        return self

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(pool[: self._block_size].nbytes for pool in self._pools)

    @property
    def kv_format(self) -> str:
        shapes = [tuple(pool.shape[1:]) for pool in self._pools]
        return f"torch {self._device.type} {self._pools[0].dtype} {self._block_size} {shapes}"

    def export_block(self, block: int) -> bytes:
        """A block's keys of all layers, and then its values."""
        return b"".join(slots.contiguous().cpu().view(torch.uint8).numpy().tobytes() for slots in self._slots(block))

    def import_block(self, block: int, data: bytes) -> None:
        start = 0
        for slots in self._slots(block):
            part = torch.frombuffer(bytearray(data[start : start + slots.nbytes]), dtype=slots.dtype)
            slots.copy_(part.view(slots.shape))
            start += slots.nbytes

    def copy_blocks(self, copies: Int32Array) -> None:
        size = self._block_size
        for source, target, num_slots in copies.tolist():
            for pool in self._pools:
                pool[target * size : target * size + num_slots] = pool[source * size : source * size + num_slots]

    @property
    def _pools(self) -> list[Tensor]:
        return [*self._keys, *self._values]

    def _slots(self, block: int) -> list[Tensor]:
        """A block's part of every pool."""
        return [pool[block * self._block_size : (block + 1) * self._block_size] for pool in self._pools]

    def begin_step(self, batch: StepBatch) -> LayerAttention:
        offsets = torch.arange(self._block_size, device=self._device)
        sequences = []
        for start, end, length, blocks in zip(
            batch.query_starts[:-1].tolist(),
            batch.query_starts[1:].tolist(),
            batch.context_lens.tolist(),
            batch.block_tables,
            strict=True,
        ):
            table = torch.from_numpy(blocks).to(self._device, torch.long)
            slots = (table[:, None] * self._block_size + offsets).flatten()[:length]
            sequences.append(_SequenceRows(start, end, slots))
        return _TorchStep(self._keys, self._values, sequences)


@dataclass(frozen=True, slots=True)
class _SequenceRows:
    """Rows `start:end` of the batch are the newest tokens of the sequence whose tokens lie in `slots`, in order."""

    start: int
    end: int
    slots: Tensor

    @property
    def new_slots(self) -> Tensor:
        return self.slots[len(self.slots) - (self.end - self.start) :]


@dataclass(frozen=True, slots=True)
class _TorchStep:
    keys: list[Tensor]
    values: list[Tensor]
    sequences: list[_SequenceRows]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        for rows in self.sequences:
            keys[rows.new_slots] = key[:, rows.start : rows.end].transpose(0, 1)
            values[rows.new_slots] = value[:, rows.start : rows.end].transpose(0, 1)
        outputs = [
            attend_densely(
                query[:, rows.start : rows.end],
                keys[rows.slots].transpose(0, 1),
                values[rows.slots].transpose(0, 1),
                options,
            )
            for rows in self.sequences
        ]
        return torch.cat(outputs)
