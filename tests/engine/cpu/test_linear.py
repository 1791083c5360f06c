"""Packed products: right, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from caudex.engine.cpu import PackedLinear, ThreadPool, available_isas, pack_linear_layers

THREADS = ThreadPool(2)
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def packed(linear: nn.Module, isa: str = "auto", threads: ThreadPool = THREADS) -> PackedLinear:
    holder = nn.Sequential(linear)
    assert pack_linear_layers(holder, threads, isa) == 1
    layer = holder[0]
    assert isinstance(layer, PackedLinear)
    return layer


def random_linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (576, 33), (7, 5), (1, 1), (129, 256)])
@pytest.mark.parametrize("rows", [1, 2, 5, 13, 24, 40])
def test_equals_a_float64_product(isa: str, dtype: torch.dtype, inputs: int, outputs: int, rows: int) -> None:
    linear = random_linear(inputs, outputs, dtype)
    x = torch.randn(rows, inputs).to(dtype)
    expected = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    torch.testing.assert_close(packed(linear, isa)(x).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_no_rows_give_no_rows(num_threads: int, dtype: torch.dtype, isa: str) -> None:
    """The head of a model gets none in a step that only computes the beginning of a prompt."""
    layer = packed(random_linear(64, 96, dtype), isa, ThreadPool(num_threads))
    assert layer(torch.empty(1, 0, 64, dtype=dtype)).shape == (1, 0, 96)


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 80),
    outputs=st.integers(1, 130),
    rows=st.integers(1, 400),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(available_isas()),
    num_threads=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_a_row_has_the_same_bits_in_any_batch(
    inputs: int, outputs: int, rows: int, dtype: torch.dtype, isa: str, num_threads: int, data: st.DataObject
) -> None:
    layer = packed(random_linear(inputs, outputs, dtype), isa, ThreadPool(num_threads))
    x = torch.randn(rows, inputs).to(dtype)
    together = layer(x)
    for row in data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=5)):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])
    first = data.draw(st.integers(0, rows - 1))
    assert torch.equal(layer(x[first:]), together[first:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv1d_is_packed_by_its_columns(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv = Conv1D(48, 20).to(dtype).requires_grad_(requires_grad=False)
    conv.bias.normal_()
    x = torch.randn(3, 4, 20).to(dtype)
    torch.testing.assert_close(packed(conv)(x), conv(x), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_no_bias() -> None:
    linear = random_linear(16, 16, torch.float32, bias=False)
    x = torch.randn(2, 16)
    torch.testing.assert_close(packed(linear)(x), linear(x))


def test_rows_of_a_strided_input() -> None:
    layer = packed(random_linear(16, 8, torch.float32))
    x = torch.randn(4, 2, 16)
    assert torch.equal(layer(x.transpose(0, 1)), layer(x).transpose(0, 1))


def test_every_layer_of_a_model_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), nn.LayerNorm(2))
    assert pack_linear_layers(model, THREADS) == 2
    assert not any(isinstance(module, nn.Linear) for module in model.modules())


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        packed(random_linear(4, 4, torch.float16))
    with pytest.raises(ValueError, match="with 5 features"):
        packed(random_linear(4, 4, torch.float32))(torch.zeros(1, 5))


@pytest.mark.parametrize("rows", [1, 7, 12, 13, 40, 100])
def test_odd_weights_keep_every_bit(rows: int) -> None:
    """Zeros and weights of all magnitudes, a few among such as a trained matrix has, and panels full of them."""
    torch.manual_seed(0)
    weight = torch.randn(130, 77) * 0.05
    rare = torch.rand(weight.shape) < 0.004
    weight = torch.where(rare, weight * 2.0 ** torch.randint(-120, 12, weight.shape), weight)
    weight[:, 3] = 0.0
    weight[40:70] *= 2.0 ** torch.randint(-100, 10, (30, 77))
    linear = nn.Linear(77, 130, bias=False, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
    linear.weight.copy_(weight)
    one_by_one = torch.eye(77, dtype=torch.bfloat16)
    finite_normal = torch.where(linear.weight.abs() < 2.0**-126, 0.0, linear.weight)
    assert torch.equal(packed(linear)(one_by_one).T, finite_normal)
    x = torch.randn(rows, 77).to(torch.bfloat16)
    assert torch.equal(packed(linear)(x), torch.cat([packed(linear)(row[None]) for row in x]))
