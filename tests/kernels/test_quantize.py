"""Quantised values: all 65,536 BF16 bit patterns, bit for bit, and the functions around them."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.helpers.values import all_bfloat16
from torch import Tensor

from fp8scope_kernels import (
    DATA_FORMATS,
    E2M3,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    Format,
    amax_to_scale,
    quantize,
    quantize_values,
    round_to_format,
    tensor_to_amax,
    to_fp8_saturated,
)
from fp8scope_kernels.recipes import NONFINITE, Nonfinite

WITNESSES = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
SCALES = [1.0, 2.0**-9, 2.0**13, 0.3, 177.7, 3.4028234663852886e38, 1.1754943508222875e-38]

formats = pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ], ids=lambda fmt: fmt.name)
data_formats = pytest.mark.parametrize("fmt", DATA_FORMATS.values(), ids=DATA_FORMATS)
scales = pytest.mark.parametrize("scale", SCALES)
nonfinites = pytest.mark.parametrize("nonfinite", NONFINITE)


def assert_same_values(actual: Tensor, expected: Tensor) -> None:
    """Equal, NaN to NaN."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(0.0, 1e9, -1e9), expected.nan_to_num(0.0, 1e9, -1e9))


def test_it_works() -> None:
    x = torch.tensor([[1.0, -448.0], [1000.0, 0.1]])
    q = quantize(x, torch.tensor(1.0), E4M3)
    assert q.data.dtype == torch.float8_e4m3fn
    assert q.data.float().tolist() == [[1.0, -448.0], [448.0, 0.1015625]]
    assert q.dequantize().tolist() == [[1.0, -448.0], [448.0, 0.1015625]]


@formats
@scales
@nonfinites
def test_all_bfloat16_equals_torchs_cast_after_clamping(
    fmt: Format, scale: float, nonfinite: Nonfinite
) -> None:
    assert fmt.dtype is not None
    x = all_bfloat16()
    s = torch.tensor(scale)
    clamped = (x.float() * s).clamp(-fmt.max, fmt.max)
    if nonfinite == "propagate":
        clamped = torch.where(x.isinf(), torch.copysign(torch.tensor(torch.nan), x), clamped)
    expected = clamped.to(fmt.dtype)
    data = quantize(x, s, fmt, nonfinite=nonfinite).data
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert_same_values(quantize_values(x, s, fmt, nonfinite=nonfinite).float(), expected.float())


@data_formats
@scales
@nonfinites
def test_all_bfloat16_equals_ml_dtypes(fmt: Format, scale: float, nonfinite: Nonfinite) -> None:
    x = all_bfloat16()
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.float().numpy() * np.float32(scale)
    number = ~np.isnan(scaled)
    if nonfinite == "propagate":
        number &= torch.isfinite(x).numpy()
    rounded = np.clip(scaled, -fmt.max, fmt.max)[number].astype(WITNESSES[fmt.name]).astype(np.float32)
    s = torch.tensor(scale)
    values = quantize_values(x, s, fmt, nonfinite=nonfinite).float().numpy()
    # FP6 and FP4 have no NaN; as bfloat16 values it survives.
    np.testing.assert_array_equal(values[number], rounded)
    assert np.isnan(values[~number]).all()
    if fmt.dtype is not None:
        data = quantize(x, s, fmt, nonfinite=nonfinite).data
        np.testing.assert_array_equal(data.float().numpy(), values)


@formats
@scales
@nonfinites
def test_unclamped_equals_the_non_saturating_conversion(
    fmt: Format, scale: float, nonfinite: Nonfinite
) -> None:
    x = all_bfloat16()
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.float().numpy() * np.float32(scale)
        # ml_dtypes neither clamps nor keeps Inf: exactly what leaving the clamp out should give.
        expected = torch.from_numpy(scaled.astype(WITNESSES[fmt.name]).astype(np.float32))
    if nonfinite == "propagate":
        expected = expected.masked_fill(x.isinf(), torch.nan)
    s = torch.tensor(scale)
    data = quantize(x, s, fmt, saturate=False, nonfinite=nonfinite).data
    assert_same_values(data.float(), expected)
    assert_same_values(quantize_values(x, s, fmt, saturate=False, nonfinite=nonfinite).float(), expected)
    assert not torch.isfinite(expected).all()


@data_formats
def test_rounding_in_arithmetic_equals_the_cast_around_every_boundary(fmt: Format) -> None:
    """Each representable value, each midpoint, and the float32 neighbours of both."""
    values = torch.unique(fmt.table[torch.isfinite(fmt.table)])
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    x = torch.cat([points, *(torch.nextafter(points, torch.tensor(t)) for t in (-torch.inf, torch.inf))])
    x = x[x.abs() <= fmt.max]
    expected = x.numpy().astype(WITNESSES[fmt.name]).astype(np.float32)
    np.testing.assert_array_equal(round_to_format(x, fmt).numpy(), expected)


@formats
def test_rounding_in_arithmetic_equals_the_cast_on_random_bits(fmt: Format) -> None:
    assert fmt.dtype is not None
    bits = torch.randint(-(2**31), 2**31, (500_000,), generator=torch.Generator().manual_seed(1))
    x = bits.to(torch.int32).view(torch.float32)
    x = x[x.abs() <= fmt.max]
    assert torch.equal(round_to_format(x, fmt), x.to(fmt.dtype).float())


def test_rounding_does_not_change_its_argument() -> None:
    x = torch.tensor([0.3, -0.3])
    round_to_format(x, E4M3)
    quantize_values(x, torch.tensor(8.0), E4M3)
    assert x.tolist() == torch.tensor([0.3, -0.3]).tolist()


@pytest.mark.parametrize("make", [quantize, quantize_values])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (3, 5, 7), (2**19 + 3,), (3, 2**18 + 1)])
def test_any_shape(make: Callable[..., object], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    result = make(x, torch.tensor(3.0), E4M3)
    data = result if isinstance(result, Tensor) else result.data  # type: ignore[attr-defined]
    assert data.shape == x.shape
    assert torch.equal(data.float(), (x * 3).clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_floating_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = (x.float() * 5.0).to(torch.float8_e5m2)
    assert torch.equal(quantize(x, torch.tensor(5.0), E5M2).data.float(), expected.float())


def test_a_view_that_is_not_contiguous() -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(4)).t()[::2]
    expected = x.contiguous().to(torch.float8_e4m3fn).float()
    assert torch.equal(quantize(x, torch.tensor(1.0), E4M3).data.float(), expected)


def test_bytes_need_a_dtype() -> None:
    with pytest.raises(ValueError, match=r"no dtype for E2M3; use quantize_values"):
        quantize(torch.ones(3), torch.tensor(1.0), E2M3)


def test_formats_without_nan_and_infinity_saturate_in_any_case() -> None:
    x = torch.tensor([100.0, -100.0])
    assert quantize_values(x, torch.tensor(1.0), E2M3, saturate=False).tolist() == [7.5, -7.5]


def test_refuses_integer_tensors() -> None:
    with pytest.raises(TypeError, match=r"floating-point.*int64"):
        quantize(torch.arange(3), torch.tensor(1.0), E4M3)


def test_clamping_keeps_nan_and_clamps_inf() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert to_fp8_saturated(x, E4M3).float().nan_to_num(-1.0).tolist() == [-1.0, 448.0, -448.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amax_ignores_non_finite_elements(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -3.0, torch.nan, torch.inf, -torch.inf, 2.0], dtype=dtype)
    assert tensor_to_amax(x).item() == 3.0
    assert tensor_to_amax(x[2:5]).item() == 0.0
    assert tensor_to_amax(x[:0]).item() == 0.0
    assert tensor_to_amax(x).dtype == torch.float32


@formats
def test_scale_puts_amax_at_the_largest_value(fmt: Format) -> None:
    amax = torch.tensor([1.0, 0.37, 1e-30, 3e38])
    assert torch.equal(amax_to_scale(amax, fmt), torch.tensor(fmt.max) / amax)
    assert torch.equal(amax_to_scale(amax, fmt, margin=2), torch.tensor(fmt.max / 4) / amax)


def test_scale_of_a_zero_or_non_finite_amax() -> None:
    amax = torch.tensor([0.0, torch.inf, torch.nan])
    assert amax_to_scale(amax, E4M3).tolist() == [1.0, 1.0, 1.0]
    assert amax_to_scale(amax, E4M3, otherwise=torch.tensor(7.0)).tolist() == [7.0, 7.0, 7.0]
    assert amax_to_scale(amax, E4M3, power_of_two=True).tolist() == [1.0, 1.0, 1.0]


def test_scale_stays_within_float32() -> None:
    info = torch.finfo(torch.float32)
    assert amax_to_scale(torch.tensor(1e-45), E4M3).item() == info.max
    assert amax_to_scale(torch.tensor(1e-45), E4M3, power_of_two=True).item() == 2.0**127
    assert amax_to_scale(torch.tensor(info.max), E4M3, margin=64).item() == info.tiny


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from([E4M3, E5M2, E4M3FNUZ, E5M2FNUZ]))
def test_a_power_of_two_scale_is_the_largest_that_does_not_saturate(amax: float, fmt: Format) -> None:
    scale = amax_to_scale(torch.tensor(amax), fmt, power_of_two=True).item()
    assert np.log2(scale) == int(np.log2(scale))
    assert scale * amax <= fmt.max
    # float32 division may round M/amax up to a power of two, never down past one.
    assert 2 * scale * amax * (1 + 2**-23) > fmt.max
