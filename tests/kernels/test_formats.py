"""Every property of a format, checked against every value it can represent."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8scope_kernels import (
    DATA_FORMATS,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    Format,
    in_encoding,
)

WITNESSES = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E3M2": ml_dtypes.float6_e3m2fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E8M0": ml_dtypes.float8_e8m0fnu,
}

formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def test_it_works() -> None:
    assert E4M3.max == 448.0
    assert E5M2.max == 57344.0
    assert FORMATS["E4M3"] is E4M3
    assert set(FORMATS) - set(DATA_FORMATS) == {"E8M0"}


def test_published_figures() -> None:
    # "FP8 Formats for Deep Learning" (2022), table 1.
    assert (E4M3.smallest_normal, E4M3.smallest_subnormal) == (2.0**-6, 2.0**-9)
    assert (E5M2.smallest_normal, E5M2.smallest_subnormal) == (2.0**-14, 2.0**-16)
    assert (E4M3.has_infinity, E4M3.has_nan) == (False, True)
    assert (E5M2.has_infinity, E5M2.has_nan) == (True, True)
    assert (E4M3.bits, E5M2.bits) == (8, 8)


def test_published_figures_of_the_microscaling_formats() -> None:
    # OCP Microscaling Formats 1.0, tables 2 to 7.
    assert (E3M2.bits, E3M2.max, E3M2.smallest_normal, E3M2.smallest_subnormal) == (6, 28.0, 0.25, 0.0625)
    assert (E2M3.bits, E2M3.max, E2M3.smallest_normal, E2M3.smallest_subnormal) == (6, 7.5, 1.0, 0.125)
    assert (E2M1.bits, E2M1.max, E2M1.smallest_normal, E2M1.smallest_subnormal) == (4, 6.0, 1.0, 0.5)
    assert (E8M0.bits, E8M0.max, E8M0.smallest_normal) == (8, 2.0**127, 2.0**-127)
    assert not any(f.has_nan or f.has_infinity for f in (E3M2, E2M3, E2M1))
    assert (E8M0.signed, E8M0.has_subnormals, E8M0.has_nan) == (False, False, True)


def test_published_figures_of_the_formats_with_one_nan() -> None:
    assert (E4M3FNUZ.max, E5M2FNUZ.max) == (240.0, 57344.0)
    assert (E4M3FNUZ.smallest_normal, E4M3FNUZ.smallest_subnormal) == (2.0**-7, 2.0**-10)
    assert (E5M2FNUZ.smallest_normal, E5M2FNUZ.smallest_subnormal) == (2.0**-15, 2.0**-17)
    assert (E4M3FNUZ.nan_code, E5M2FNUZ.nan_code, E4M3.nan_code, E3M2.nan_code) == (0x80, 0x80, 0x7F, None)
    assert not E4M3FNUZ.has_negative_zero and not E5M2FNUZ.has_infinity and E4M3.has_negative_zero


def test_formats_correspond_across_encodings() -> None:
    assert in_encoding(E4M3, "fnuz") is E4M3FNUZ and in_encoding(E5M2, "fnuz") is E5M2FNUZ
    assert in_encoding(E4M3FNUZ, "ocp") is E4M3 and in_encoding(E5M2FNUZ, "ocp") is E5M2
    assert in_encoding(E4M3, "ocp") is E4M3 and in_encoding(E4M3FNUZ, "fnuz") is E4M3FNUZ
    assert in_encoding(E2M1, "fnuz") is E2M1


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0], ids=lambda fmt: fmt.name)
def test_every_bit_pattern_decodes_as_torch_does(fmt: Format) -> None:
    assert fmt.dtype is not None
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(fmt.dtype).float()
    assert torch.equal(fmt.table.isnan(), expected.isnan())
    assert torch.equal(fmt.table.nan_to_num(0.0), expected.nan_to_num(0.0))
    assert torch.equal(fmt.table.signbit()[~expected.isnan()], expected.signbit()[~expected.isnan()])


@formats
def test_every_bit_pattern_decodes_as_ml_dtypes_does(fmt: Format) -> None:
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    expected = codes.view(WITNESSES[fmt.name]).astype(np.float64)
    decoded = np.array([fmt.decode(int(code)) for code in codes])
    np.testing.assert_array_equal(decoded, expected)


@formats
def test_properties_follow_from_the_values(fmt: Format) -> None:
    values = [fmt.decode(code) for code in range(2**fmt.bits)]
    finite = sorted({value for value in values if math.isfinite(value)})
    positive = [value for value in finite if value > 0]
    assert fmt.max == finite[-1]
    assert fmt.limit == float(np.nextafter(np.float32(fmt.max), np.float32(np.inf)))
    assert fmt.signed == (finite[0] == -fmt.max)
    assert (0.0 in finite) == fmt.has_subnormals
    assert fmt.smallest_subnormal == positive[0]
    assert fmt.smallest_normal == positive[2**fmt.mantissa_bits - 1]
    assert fmt.epsilon == positive[positive.index(1.0) + 1] - 1.0
    assert fmt.has_nan == any(math.isnan(value) for value in values)
    assert fmt.has_infinity == any(math.isinf(value) for value in values)
    assert fmt.has_negative_zero == any(value == 0 and math.copysign(1, value) < 0 for value in values)
    assert fmt.nan_code is None or math.isnan(values[fmt.nan_code])
    assert 2.0**fmt.max_exponent <= fmt.max < 2.0 ** (fmt.max_exponent + 1)
    assert 2.0**fmt.min_exponent == fmt.smallest_normal


@formats
def test_a_code_out_of_range_is_refused(fmt: Format) -> None:
    for code in (-1, 2**fmt.bits):
        with pytest.raises(ValueError, match=f"codes 0 to {2**fmt.bits - 1}"):
            fmt.decode(code)


def test_a_format_is_frozen_and_compares_by_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3.bias = 8  # type: ignore[misc]
    assert dataclasses.replace(E4M3) == E4M3
    assert dataclasses.replace(E4M3, bias=8) != E4M3
    assert len({E4M3, E5M2, dataclasses.replace(E4M3)}) == 2
