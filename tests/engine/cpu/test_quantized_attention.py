"""Attention over keys and values in 8 bits: to the bit its twin's on every instruction set, and near the exact one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.engine.cpu import available_isas

from . import attention_twin, quantized_attention_twin
from .attention_twin import Part, Prompt, blocks_for, new_pool, random_prompt, run_step

DTYPES = [torch.float32, torch.bfloat16]
SCALE = 0.3


def attended(prompt: Prompt, isa: str, block_size: int = 16) -> torch.Tensor:
    _, kv_heads, head_dim = prompt.key.shape
    pool = new_pool(
        kv_heads, head_dim, prompt.key.dtype, block_size=block_size, num_blocks=600, quantized=True, isa=isa
    )
    return run_step(pool, [Part(prompt, 0, len(prompt), blocks_for(len(prompt), block_size))], scale=SCALE)[0]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.nan_to_num(7e7), expected.nan_to_num(7e7))


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.sampled_from([1, 5, 63, 64, 65, 200, 256, 257, 530]),
    shape=st.sampled_from([(9, 3, 64), (4, 4, 80), (4, 1, 128), (2, 2, 7), (6, 2, 16), (3, 1, 33), (2, 1, 1)]),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([1, 5, 16, 48, 64]),
    magnitude=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_equals_the_twin_to_the_bit(
    num_tokens: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    block_size: int,
    magnitude: float,
    seed: int,
) -> None:
    prompt = random_prompt(num_tokens, *shape, dtype, torch.Generator().manual_seed(seed))
    prompt.query *= magnitude
    prompt.value *= magnitude
    expected = quantized_attention_twin.reference(prompt, SCALE)
    for isa in available_isas():
        assert torch.equal(attended(prompt, isa, block_size), expected), isa


@pytest.mark.parametrize("dtype", DTYPES)
def test_is_near_what_it_stands_for(dtype: torch.dtype) -> None:
    """Of values with deviation 1, also where a few dimensions of the keys are ten times as large as the others."""
    prompt = random_prompt(400, 6, 2, 64, dtype, torch.Generator().manual_seed(0))
    prompt.key[:, :, [3, 40]] *= 10
    exact = attention_twin.reference(prompt, 1 / 8)
    error = attended(prompt, "auto").double() - attention_twin.reference(prompt, SCALE)
    pool = new_pool(2, 64, dtype, quantized=True)
    error = run_step(pool, [Part(prompt, 0, 400, blocks_for(400, 16))], scale=1 / 8)[0].double() - exact
    assert error.square().mean().sqrt() < 0.015


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_weigh_alike(dtype: torch.dtype) -> None:
    prompt = random_prompt(100, 2, 1, 32, dtype, torch.Generator().manual_seed(0))
    prompt.query[:50] = 0
    prompt.key[60:] = 0
    prompt.value[:30] = 0
    prompt.value[30:] = 2
    for isa in available_isas():
        output = attended(prompt, isa)
        assert torch.equal(output, quantized_attention_twin.reference(prompt, SCALE))
        assert (output[:30] == 0).all()
        torch.testing.assert_close(output[49].float(), torch.full((2, 32), 0.8), rtol=1e-2, atol=0)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_the_rows_that_see_it(isa: str, dtype: torch.dtype, poison: float) -> None:
    prompt = random_prompt(300, 2, 1, 20, dtype, torch.Generator().manual_seed(0))
    expected = attended(prompt, isa)
    prompt.query[100, 0, 3] = poison
    spoilt_query = attended(prompt, isa)
    assert not spoilt_query[100, 0].isfinite().any()
    spoilt_query[100, 0] = expected[100, 0]
    assert torch.equal(spoilt_query, expected)
    for tensor in (prompt.key, prompt.value):
        prompt.query[100] = 0
        good = tensor[150].clone()
        tensor[150, 0, 7] = poison
        spoilt = attended(prompt, isa)
        assert torch.equal(spoilt[:100], expected[:100])
        assert torch.equal(spoilt[101:150], expected[101:150])
        assert not spoilt[150:].isfinite().any()
        tensor[150] = good
