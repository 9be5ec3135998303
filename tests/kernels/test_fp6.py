"""FP6 weights: every code, the split into 2 and 4 bits, rows of any length, and the layer."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fp8scope_kernels import BLOCK_STATISTICS, E3M2, STATISTICS
from fp8scope_kernels.fp6 import (
    GROUP,
    Fp6Linear,
    Fp6Weight,
    decode_fp6,
    encode_fp6,
    pack_fp6,
    quantize_fp6,
    unpack_fp6,
)

ALL = torch.arange(64, dtype=torch.uint8)


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


def test_it_works() -> None:
    weight = matrix(32, 48)
    packed = quantize_fp6(weight)
    assert packed.two.shape == (32, 12) and packed.four.shape == (32, 24)
    assert packed.nbytes == 32 * 48 * 6 // 8 + 32 * 4
    # Every element to the nearest value of its row: a brute force over all 64.
    scale = 28.0 / weight.abs().amax(1, keepdim=True)
    distances = (weight * scale).unsqueeze(-1) - E3M2.table
    nearest = distances.abs().amin(-1)
    found = (packed.dequantize() * scale - weight * scale).abs()
    torch.testing.assert_close(found, nearest, rtol=0, atol=1e-5)


def test_every_code_has_its_value_and_back() -> None:
    """By the format's own definition, all 64 of them; of the two zeros, the positive one comes back."""
    values = decode_fp6(ALL)
    assert values.tolist() == [E3M2.decode(code) for code in range(64)]
    assert math.copysign(1, values[32].item()) == -1
    codes = encode_fp6(values)
    assert codes.tolist() == [0 if code == 32 else code for code in range(64)]
    assert encode_fp6(values.bfloat16()).tolist() == codes.tolist()


def test_every_code_survives_packing_at_every_position() -> None:
    codes = torch.stack([ALL.roll(shift) for shift in range(64)])
    two, four = pack_fp6(codes)
    assert (two.dtype, four.dtype) == (torch.uint8, torch.uint8)
    assert torch.equal(unpack_fp6(two, four, 64), codes)


def test_every_value_is_exact() -> None:
    """A row that already holds E3M2's values is not changed, whatever power of two it is scaled by."""
    for factor in (1.0, 2.0**-20, 2.0**30):
        weight = (E3M2.table * factor).reshape(1, 64)
        assert torch.equal(quantize_fp6(weight).dequantize(), weight)


def test_layout_by_hand() -> None:
    """Codes 0 to 15 and the same with the upper bits set: which bits lie where."""
    codes = torch.arange(16, dtype=torch.uint8).reshape(1, 16) + 16 * (
        torch.arange(16, dtype=torch.uint8) // 4
    )
    two, four = pack_fp6(codes)
    # Code j has its upper bits equal to j // 4, so that each byte of `two` is 0, 1, 2, 3 from below.
    assert two.tolist() == [[0b11100100] * 4]
    assert four.tolist() == [[j | (j + 8) << 4 for j in range(8)]]


@given(st.data())
@settings(max_examples=60)
def test_packing_round_trip(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 70))
    values = data.draw(st.lists(st.integers(0, 63), min_size=rows * columns, max_size=rows * columns))
    codes = torch.tensor(values, dtype=torch.uint8).reshape(rows, columns)
    two, four = pack_fp6(codes)
    padded = -(-columns // GROUP) * GROUP
    assert two.nbytes + four.nbytes == rows * padded * 6 // 8
    assert two.shape[1] % 4 == 0 and four.shape[1] % 4 == 0
    assert torch.equal(unpack_fp6(two, four, columns), codes)


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**31), st.integers(-30, 30))
@settings(max_examples=60)
def test_the_error_is_half_a_last_place(rows: int, columns: int, seed: int, exponent: int) -> None:
    """2^-3 of each element, or half the smallest subnormal under the row's scale."""
    weight = matrix(rows, columns, seed) * 2.0**exponent
    packed = quantize_fp6(weight)
    bound = torch.maximum(weight.abs() * 2**-3, packed.inverse_scale * E3M2.smallest_subnormal / 2)
    assert bool(((packed.dequantize() - weight).abs() <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    weight = matrix(3, 20).to(dtype)
    assert torch.equal(quantize_fp6(weight).dequantize(), quantize_fp6(weight.float()).dequantize())
    assert quantize_fp6(weight).dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_odd_matrices() -> None:
    for shape in ((0, 8), (4, 0), (1, 1), (3, 17)):
        weight = matrix(*shape)
        packed = quantize_fp6(weight)
        assert packed.inverse_scale.shape == (shape[0], 1)
        assert packed.dequantize().shape == shape
    zeros = quantize_fp6(torch.zeros(2, 5))
    assert torch.equal(zeros.dequantize(), torch.zeros(2, 5))
    strided = matrix(40, 6).t()
    assert torch.equal(quantize_fp6(strided).dequantize(), quantize_fp6(strided.contiguous()).dequantize())


def test_a_large_row_does_not_hurt_the_others() -> None:
    weight = matrix(2, 32)
    larger = torch.cat((weight, 1e6 * weight))
    assert torch.equal(quantize_fp6(larger).dequantize()[:2], quantize_fp6(weight).dequantize())


def test_statistics() -> None:
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    block_row = torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64)
    weight = matrix(16, 100)
    packed = quantize_fp6(weight, row, block_row)
    stats = dict(zip(STATISTICS, row.tolist(), strict=True))
    assert stats["numel"] == 1600
    assert stats["amax"] == weight.abs().max().item()
    assert stats["underflow"] == (packed.dequantize() == 0).sum().item() > 0
    assert stats["subnormal"] > 0
    assert block_row[0].item() == 16


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"got shape \(2, 3, 4\)"):
        quantize_fp6(torch.zeros(2, 3, 4))
    with pytest.raises(TypeError, match="got torch.int64"):
        quantize_fp6(torch.zeros(2, 3, dtype=torch.int64))
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(ValueError, match="has NaN or Inf elements"):
            quantize_fp6(torch.tensor([[1.0, bad]]))
    with pytest.raises(ValueError, match="a uint8 matrix, got torch.int32"):
        pack_fp6(torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="Codes have 6 bits, got 64"):
        pack_fp6(torch.tensor([[1, 64]], dtype=torch.uint8))
    two, four = pack_fp6(ALL.reshape(2, 32))
    with pytest.raises(ValueError, match="33 columns take 12 and 24 bytes a row"):
        unpack_fp6(two, four, 33)
    with pytest.raises(ValueError, match="32 columns take 8 and 16 bytes a row"):
        unpack_fp6(two[:1], four, 32)
    with pytest.raises(ValueError, match=r"bias must have shape \(2,\), got \(3,\)"):
        Fp6Linear(quantize_fp6(matrix(2, 4)), torch.zeros(3))


# --- the layer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)])
def test_the_layer_multiplies_the_dequantised_weight(bias: bool, leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(19, 7, bias=bias)
    before = linear.weight.detach().clone()
    layer = Fp6Linear.from_linear(linear)
    x = torch.randn(*leading, 19)
    reference = nn.Linear(19, 7, bias=bias)
    reference.load_state_dict(linear.state_dict())
    reference.weight.data = quantize_fp6(before).dequantize()
    assert torch.equal(layer(x), reference(x))
    assert torch.equal(linear.weight, before)
    assert not list(layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_output_has_the_inputs_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    layer = Fp6Linear.from_linear(linear)
    x = torch.randn(8, 64)
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), layer(x), rtol=2e-2, atol=2e-2)
    # And it is close to the layer that it stands for: E3M2's errors average out over 64 products.
    error = torch.linalg.vector_norm(y - linear(x)) / torch.linalg.vector_norm(linear(x))
    assert error < 0.1


def test_autocast() -> None:
    layer = Fp6Linear.from_linear(nn.Linear(16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 16)).dtype == torch.bfloat16


def test_gradients_reach_the_input() -> None:
    layer = Fp6Linear.from_linear(nn.Linear(16, 8))
    x = torch.randn(4, 16, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.dequantize().sum(0).expand(4, 16))


def test_casting_the_module_keeps_the_scales() -> None:
    layer = Fp6Linear.from_linear(nn.Linear(16, 8))
    expected = layer.weight.dequantize()
    layer.bfloat16()
    assert layer.inverse_scale.dtype == torch.float32
    assert layer.bias is not None and layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight.dequantize(), expected)
    assert layer.to("meta").inverse_scale.device.type == "meta"


def test_state_dict_and_copies() -> None:
    layer, other = (Fp6Linear.from_linear(nn.Linear(24, 8)) for _ in range(2))
    x = torch.randn(3, 24)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert isinstance(layer.weight, Fp6Weight)
    assert "in_features=24, out_features=8, format=E3M2" in repr(layer)


def test_it_compiles_to_one_graph() -> None:
    layer = Fp6Linear.from_linear(nn.Linear(24, 8))
    x = torch.randn(3, 24)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
