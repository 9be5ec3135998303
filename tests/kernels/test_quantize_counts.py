"""Counters against an independent brute-force count in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.helpers.values import all_bfloat16
from torch import Tensor

from fp8scope_kernels import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    STATISTICS,
    Format,
    quantize,
    quantize_values,
    reference,
)

SCALES = [1.0, 2.0**-9, 2.0**13, 0.3, 177.7, 3.4028234663852886e38, 1.1754943508222875e-38]
BOTH = pytest.mark.parametrize("make", [quantize, quantize_values], ids=["bytes", "values"])
formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def brute_force(x: Tensor, scale: float, fmt: Format) -> dict[str, float]:
    """The definitions, word for word, over numpy float64 and the table of the format's values."""
    wide = x.double().numpy()
    # x*s is a float32 product, so its rounding is part of the definition; everything after is exact.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (x.float().numpy() * np.float32(scale)).astype(np.float64)
    finite = np.isfinite(wide)
    limit = np.nextafter(np.float32(fmt.max), np.float32(np.inf))
    table = np.array(sorted(v for v in {fmt.decode(c) for c in range(2**fmt.bits)} if math.isfinite(v)))
    clamped = np.clip(np.where(finite, scaled, 0.0), -fmt.max, fmt.max)
    nearest = np.abs(table[None, :] - clamped[:, None])
    # Among two at equal distance the even one wins: in the sorted table neighbours alternate around zero.
    evenness = np.abs(np.arange(len(table)) - int(np.flatnonzero(table == 0)[0])) % 2
    q = table[np.lexsort((np.broadcast_to(evenness, nearest.shape), nearest), axis=1)[:, 0]]
    q = np.where(finite, q, np.where(np.isnan(wide), np.nan, np.sign(wide) * fmt.max))
    return {
        "numel": float(wide.size),
        "amax": float(np.abs(wide[finite]).max()) if finite.any() else 0.0,
        "scale": float(np.float32(scale)),
        "saturated": float((finite & (np.abs(scaled) > limit)).sum()),
        "underflow": float(((wide != 0) & (q == 0)).sum()),
        "subnormal": float(((q != 0) & (np.abs(q) < fmt.smallest_normal)).sum()),
        "nonfinite": float((~finite).sum()),
    }


def counted(make: object, x: Tensor, scale: float, fmt: Format) -> dict[str, float]:
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    make(x, torch.tensor(scale), fmt, row)  # type: ignore[operator]
    return dict(zip(STATISTICS, row.tolist(), strict=True))


def test_it_works() -> None:
    x = torch.tensor([1e4, -2.0, 0.0, 1e-5, 2.0**-8, torch.inf, torch.nan])
    stats = counted(quantize, x, 1.0, E4M3)
    assert stats == {
        "numel": 7,
        "amax": 1e4,
        "scale": 1,
        "saturated": 1,
        "underflow": 1,
        "subnormal": 1,
        "nonfinite": 2,
    }


@BOTH
@formats
@pytest.mark.parametrize("scale", SCALES)
def test_all_bfloat16(make: object, fmt: Format, scale: float) -> None:
    x = all_bfloat16()
    assert counted(make, x, scale, fmt) == brute_force(x, scale, fmt)


@pytest.mark.parametrize("fmt", [E3M2, E2M3, E2M1], ids=lambda fmt: fmt.name)
def test_all_bfloat16_in_smaller_formats(fmt: Format) -> None:
    x = all_bfloat16()
    assert counted(quantize_values, x, 0.3, fmt) == brute_force(x, 0.3, fmt)


@BOTH
@formats
def test_every_boundary(make: object, fmt: Format) -> None:
    """Each representable value and midpoint, with its float32 neighbours."""
    values = torch.unique(fmt.table[torch.isfinite(fmt.table)])
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    x = torch.cat([points, *(torch.nextafter(points, torch.tensor(t)) for t in (-torch.inf, torch.inf))])
    assert counted(make, x, 1.0, fmt) == brute_force(x, 1.0, fmt)


@BOTH
@given(
    values=st.lists(st.floats(width=32), max_size=40),
    scale=st.floats(2.0**-100, 2.0**100, width=32),
    fmt=st.sampled_from([E4M3, E5M2]),
)
def test_any_float32(make: object, values: list[float], scale: float, fmt: Format) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    assert counted(make, x, scale, fmt) == brute_force(x, scale, fmt)


@BOTH
def test_a_tensor_in_several_chunks(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CPU_CHUNK", 100)
    x = all_bfloat16()[:1050]
    assert counted(make, x, 3.0, E4M3) == brute_force(x, 3.0, E4M3)


@BOTH
@pytest.mark.parametrize("fill", [0.0, torch.nan, torch.inf, -torch.inf, 1e-45, 3e38])
def test_a_tensor_of_one_value(make: object, fill: float) -> None:
    x = torch.full((33,), fill)
    assert counted(make, x, 1.0, E4M3) == brute_force(x, 1.0, E4M3)


@BOTH
def test_an_empty_tensor(make: object) -> None:
    assert counted(make, torch.empty(0, 16), 2.0, E4M3) == {**dict.fromkeys(STATISTICS, 0.0), "scale": 2.0}


@BOTH
def test_without_clamping_the_same_is_counted(make: object) -> None:
    """`saturated` counts what lies beyond the limit, whatever then becomes of it."""
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    x = all_bfloat16()
    make(x, torch.tensor(1.0), E4M3, row, saturate=False)  # type: ignore[operator]
    assert dict(zip(STATISTICS, row.tolist(), strict=True)) == brute_force(x, 1.0, E4M3)


@BOTH
def test_a_small_workspace_is_replaced_by_a_larger(make: object) -> None:
    for size in (3, 50_000, 7):
        x = torch.linspace(-500, 500, size)
        assert counted(make, x, 1.0, E4M3) == brute_force(x, 1.0, E4M3)
