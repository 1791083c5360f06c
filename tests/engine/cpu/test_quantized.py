"""Products in 8 bits, with weights in 8 or 4: a plain twin's bits on every instruction set, for any number of rows,
and close to the exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from caudex.engine.cpu import PackedLinear, QuantizedBits, ThreadPool, available_isas, pack_linear_layers

from .quantized_twin import product, quantized_to_four_bits

THREADS = ThreadPool(2)
DTYPES = [torch.float32, torch.bfloat16]
BITS: tuple[QuantizedBits, ...] = (8, 4)


def packed(
    weight: torch.Tensor, isa: str, bias: torch.Tensor | None = None, *, bits: QuantizedBits = 8
) -> PackedLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    linear.requires_grad_(requires_grad=False).weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
    holder = nn.Sequential(linear)
    assert pack_linear_layers(holder, THREADS, isa, bits=bits) == 1
    layer = holder[0]
    assert isinstance(layer, PackedLinear)
    return layer


def uneven(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """Inputs with a few very large ones, as inside a language model, zeros, and rows that hold nothing else."""
    x = torch.randn(rows, depth) * torch.exp(2 * torch.randn(rows, depth))
    x[torch.rand(x.shape) < 0.05] = 0.0
    x[:: max(3, rows // 3)] = 0.0
    return x.to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    inputs=st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 576, 1536])),
    outputs=st.integers(1, 130),
    rows=st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 191, 193, 260])),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from(BITS),
    isa=st.sampled_from(available_isas()),
    seed=st.integers(0, 1 << 16),
)
def test_equals_the_plain_twin_to_the_bit(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype, bits: QuantizedBits, isa: str, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(outputs, inputs).to(dtype), uneven(rows, inputs, dtype)
    weight[-1] = 0.0
    weight[0] *= (torch.randn(inputs) * 3).exp()  # groups of many sizes in a column
    expected = torch.from_numpy(product(x.float().numpy(), weight.float().numpy(), bits)).to(dtype)
    assert torch.equal(packed(weight, isa, bits=bits)(x), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(bits: QuantizedBits, isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer, x = packed(torch.randn(100, 130).to(dtype), isa, bits=bits), uneven(270, 130, dtype)
    together = layer(x)
    for first, end in [(0, 1), (1, 2), (3, 15), (200, 213), (70, 134), (5, 270), (260, 270)]:
        assert torch.equal(layer(x[first:end]), together[first:end])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("isa", available_isas())
def test_the_largest_magnitudes_do_not_saturate(bits: QuantizedBits, isa: str) -> None:
    """All weights and inputs at the end of their range: the instruction that multiplies bytes in pairs would clip."""
    signs = torch.ones(64, 4096)
    signs[1::2] = -1.0
    sums = packed(signs * 3.0, isa, bits=bits)(torch.full((13, 4096), -5.0))
    torch.testing.assert_close(sums, (-5.0 * 3.0 * 4096 * signs[:, 0]).expand(13, 64), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("isa", available_isas())
def test_errs_by_less_than_half_a_step_an_input(isa: str) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(50, 576), torch.randn(20, 576) * 10
    bias = torch.randn(50)
    weight_step = weight.abs().amax(1) / 127
    x_step = x.reshape(20, 9, 64).abs().amax(2, keepdim=True).expand(-1, -1, 64).reshape(20, 576) / 127
    bound = 0.51 * (
        x_step @ weight.abs().T + x.abs().sum(1)[:, None] * weight_step + x_step.sum(1)[:, None] * weight_step
    )
    assert bool(((packed(weight, isa, bias)(x) - (x @ weight.T + bias)).abs() <= bound).all())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_spoils_its_row_and_its_column_only(
    bits: QuantizedBits, isa: str, dtype: torch.dtype, bad: float
) -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(70, 200).to(dtype), torch.randn(20, 200).to(dtype)
    clean = packed(weight, isa, bits=bits)(x)
    weight[33, 199], x[7, 5] = bad, bad
    spoiled = packed(weight, isa, bits=bits)(x)
    assert not torch.isfinite(spoiled[7]).any()
    assert bool(spoiled[:, 33].isnan().all())
    rows, columns = np.delete(np.arange(20), 7), np.delete(np.arange(70), 33)
    assert torch.equal(spoiled[rows][:, columns], clean[rows][:, columns])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_and_huge_inputs(dtype: torch.dtype) -> None:
    """Magnitudes whose inverse would not be finite count as zero; the largest keep their place."""
    weight = torch.eye(64).to(dtype)
    for isa in available_isas():
        layer = packed(weight, isa)
        assert not layer(torch.full((1, 64), 1e-38).to(dtype)).any()
        huge = torch.full((1, 64), 1e34).to(dtype)
        torch.testing.assert_close(layer(huge), huge, rtol=1e-2, atol=0.0)


def test_exact_modules_stay_as_they_are() -> None:
    torch.manual_seed(4)
    kept, x = nn.Linear(32, 8), torch.randn(3, 32)
    model = nn.Sequential(nn.Linear(64, 32), kept).requires_grad_(requires_grad=False)
    expected = kept(x)
    assert pack_linear_layers(model, THREADS, bits=8, exact=(kept,)) == 2
    torch.testing.assert_close(model[1](x), expected)


def test_what_weights_take() -> None:
    """A byte each; or half a byte each, and a scale and an offset every 32."""
    weight = torch.randn(96, 576, dtype=torch.bfloat16)
    assert packed(weight, "auto").matrix.num_bytes == 96 * 576 + 96 * 4
    assert packed(weight, "auto", bits=4).matrix.num_bytes == 96 * 576 * (32 // 2 + 2) // 32 + 96 * 4


def test_weights_that_were_made_of_4_bits_stay_near() -> None:
    """Sixteen levels every 32 inputs, whatever their distance: off by little more than 8-bit weights are."""
    torch.manual_seed(5)
    levels = torch.randint(0, 16, (40, 9, 32)).float()
    levels[:, :6, 0], levels[:, :6, 1] = 0.0, 15.0  # some groups have both ends, others may lack one
    weight = levels * (0.5 + torch.rand(40, 9, 1)) - 8.0 * torch.rand(40, 9, 1)
    near, step = (torch.from_numpy(part) for part in quantized_to_four_bits(weight.reshape(40, 288).numpy()))
    errors = (near * step - weight.reshape(40, 288)).abs() / step
    assert errors.max() < 1.5
    assert errors.mean() < 0.5


def test_uneven_weights_are_rounded_better_than_to_even_steps_between_their_ends() -> None:
    torch.manual_seed(6)
    weight = torch.randn(60, 320)
    groups = weight.reshape(60, -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    even = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    near, step = (torch.from_numpy(part) for part in quantized_to_four_bits(weight.numpy()))
    assert (near * step - weight).square().mean() < 0.97 * (even.reshape(60, 320) - weight).square().mean()
