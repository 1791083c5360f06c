"""The KV pool: copying, exporting and importing blocks, and its sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .attention_twin import Part, blocks_for, new_pool, random_prompt, run_step

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_copied_and_imported_blocks_hold_the_same_bits(dtype: torch.dtype, quantized: bool, block_size: int) -> None:
    prompt = random_prompt(100, 4, 2, 20, dtype, torch.Generator().manual_seed(0))
    pool = new_pool(2, 20, dtype, block_size=block_size, num_blocks=250, num_layers=2, quantized=quantized)
    table = blocks_for(100, block_size)
    for layer in range(2):
        run_step(pool, [Part(prompt, 0, 99, table)], layer)
    expected = [run_step(pool, [Part(prompt, 99, 100, table)], layer)[0] for layer in range(2)]

    copied = table + len(table)
    pool.copy_blocks(zip(table.tolist(), copied.tolist(), strict=True))
    other = new_pool(2, 20, dtype, block_size=block_size, num_blocks=250, num_layers=2, quantized=quantized)
    for block in table.tolist():
        data = pool.export_block(block)
        assert len(data) == pool.block_bytes
        other.import_block(249 - block, data)

    for layer in range(2):
        assert torch.equal(run_step(pool, [Part(prompt, 99, 100, copied)], layer)[0], expected[layer])
        imported = (249 - table).astype(np.int32)
        assert torch.equal(run_step(other, [Part(prompt, 99, 100, imported)], layer)[0], expected[layer])


def test_a_block_takes_what_its_slots_need() -> None:
    """SmolLM2-135M: 30 layers x 3 heads x 64 x (K and V) x 2 bytes are 23,040 bytes a token."""
    pool = new_pool(3, 64, torch.bfloat16, num_layers=30, num_blocks=1000)
    assert pool.block_bytes == 16 * 23_040
    assert pool.num_bytes == 1000 * pool.block_bytes


def test_a_quantized_block_takes_a_byte_an_element_and_two_scales_a_token() -> None:
    pool = new_pool(3, 64, torch.bfloat16, num_layers=30, quantized=True)
    assert pool.block_bytes == 16 * 30 * 3 * 2 * (64 + 4)


def test_untouched_blocks_take_no_memory() -> None:
    with open("/proc/self/statm") as statm:
        before = int(statm.read().split()[1])
    pool = new_pool(8, 128, torch.float32, num_layers=32, num_blocks=1000)
    with open("/proc/self/statm") as statm:
        resident_pages = int(statm.read().split()[1]) - before
    assert pool.num_bytes > 2**31
    assert resident_pages * 4096 < 2**26


def test_wrong_blocks_are_refused() -> None:
    pool = new_pool(1, 8, torch.float32, num_blocks=4)
    with pytest.raises(ValueError, match="block 4"):
        pool.copy_blocks([(0, 4)])
    with pytest.raises(ValueError, match="block -1"):
        pool.export_block(-1)
    with pytest.raises(ValueError, match=f"{pool.block_bytes} bytes; got 3"):
        pool.import_block(0, b"abc")


@pytest.mark.parametrize(("block_size", "num_blocks"), [(0, 4), (257, 4), (16, 0)])
def test_sizes_out_of_range_are_refused(block_size: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        new_pool(1, 8, torch.float32, block_size=block_size, num_blocks=num_blocks)


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        new_pool(1, 8, torch.float16)
