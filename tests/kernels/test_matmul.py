"""Products of quantised operands, on the FP8 operator and on BF16 values alike."""

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import E4M3, E5M2, Format, measure
from fp8scope_kernels.matmul import Operand, can_multiply, has_fp8_units, multiply, to_operand

FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["values", "bytes"])


def operand(x: Tensor, scale: float, fmt: Format, fp8: bool) -> Operand:
    return to_operand(x, torch.tensor(scale), fmt, None, saturate=True, extent=measure(x), fp8=fp8)


def exact(a: Operand, b: Operand) -> Tensor:
    left, right = (o.values.double() * o.inverse_scale.double() for o in (a, b))
    return left @ right


def matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@FP8
def test_it_works(fp8: bool) -> None:
    a = operand(matrix(32, 64, seed=1), 100.0, E4M3, fp8)
    b = operand(matrix(48, 64, seed=2), 70.0, E4M3, fp8)
    assert a.values.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16)
    result = multiply(a, b.t(), torch.float32)
    expected = exact(a, b.t())
    # BF16 keeps 8 bits: half a unit in the last place, plus float32's rounding of the sum.
    error = (result - expected).abs()
    assert result.dtype == torch.float32
    assert (error <= expected.abs() * 2**-8 + expected.abs().max() * 2**-20).all()


@FP8
@pytest.mark.parametrize("tokens", [1, 5, 16, 33])
def test_sizes_that_the_units_do_not_take_are_padded(fp8: bool, tokens: int) -> None:
    """wgrad's inner size is the number of tokens, which is anything."""
    g = operand(matrix(tokens, 32, seed=3), 9.0, E5M2, fp8)
    x = operand(matrix(tokens, 16, seed=4), 50.0, E4M3, fp8)
    result = multiply(g.t(), x, torch.float32)
    expected = exact(g.t(), x)
    assert result.shape == (32, 16)
    assert ((result - expected).abs() <= expected.abs() * 2**-8 + expected.abs().max() * 2**-20).all()


@FP8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_dtype(fp8: bool, dtype: torch.dtype) -> None:
    a = operand(matrix(16, 16, seed=5), 10.0, E4M3, fp8)
    assert multiply(a, a, dtype).dtype == dtype


def test_operands_are_exact_whatever_the_scale() -> None:
    """Three is no power of two; the values are exact in BF16 because the scale is not in them."""
    x = matrix(64, 64, seed=6)
    as_bytes, as_values = operand(x, 3.0, E4M3, True), operand(x, 3.0, E4M3, False)
    assert torch.equal(as_bytes.values.float(), as_values.values.float())
    assert torch.equal(as_bytes.inverse_scale, as_values.inverse_scale)


def test_which_formats_the_units_multiply() -> None:
    assert can_multiply(E4M3, E4M3)
    assert can_multiply(E4M3, E5M2)
    assert can_multiply(E5M2, E4M3)
    assert not can_multiply(E5M2, E5M2)


def test_a_cpu_has_no_fp8_units() -> None:
    assert not has_fp8_units(torch.device("cpu"))
