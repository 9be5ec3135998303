"""The Triton kernels against the definition on the CPU: bit for bit, and count for count."""

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    DATA_FORMATS,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    STATISTICS,
    Extent,
    Format,
    amax_to_scale,
    measure,
    quantize,
    quantize_values,
    set_backend,
)
from fp8scope_kernels.backends import use_triton
from fp8scope_kernels.recipes import Nonfinite
from fp8scope_kernels.triton import backend as triton_backend

pytestmark = pytest.mark.gpu

SCALES = (0.3, 3.4028234663852886e38)
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ], ids=lambda fmt: fmt.name)
BYTES = pytest.mark.parametrize("as_bytes", [True, False], ids=["bytes", "values"])


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def spread(*shape: int, seed: int = 1) -> Tensor:
    """Values over many powers of two, so that every counter has something to count."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())


def empty_row(device: torch.device) -> Tensor:
    return torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, also in the sign of zeros. NaN need only be NaN: GPUs drop its sign."""
    actual, number = actual.cpu(), ~expected.float().isnan()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(~actual.float().isnan(), number)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.dtype.itemsize]
    assert torch.equal(actual.view(bits)[number], expected.view(bits)[number])


def run(
    backend: str,
    x: Tensor,
    scale: float,
    fmt: Format,
    *,
    as_bytes: bool,
    saturate: bool = True,
    nonfinite: Nonfinite = "propagate",
) -> tuple[Tensor, Tensor]:
    set_backend(backend)  # type: ignore[arg-type]
    row, s = empty_row(x.device), torch.tensor(scale, device=x.device)
    if as_bytes:
        return quantize(x, s, fmt, row, saturate=saturate, nonfinite=nonfinite).data, row
    return quantize_values(x, s, fmt, row, saturate=saturate, nonfinite=nonfinite), row


def assert_same(
    x: Tensor,
    device: torch.device,
    scale: float,
    fmt: Format,
    *,
    as_bytes: bool = True,
    saturate: bool = True,
    nonfinite: Nonfinite = "propagate",
) -> None:
    """`x` on the CPU, or already where it is to be quantised."""
    there = x if x.device == device else x.to(device)
    actual, row = run("triton", there, scale, fmt, as_bytes=as_bytes, saturate=saturate, nonfinite=nonfinite)
    expected, expected_row = run(
        "reference", x.cpu(), scale, fmt, as_bytes=as_bytes, saturate=saturate, nonfinite=nonfinite
    )
    assert_same_bits(actual, expected)
    assert row.tolist() == expected_row.tolist()


def test_it_works(device: torch.device) -> None:
    set_backend("triton")
    x = torch.tensor([1e4, -2.0, 0.0, 1e-5, 2.0**-8, torch.inf, torch.nan, -1e-5], device=device)
    assert use_triton(x, "quantize")
    row = empty_row(device)
    q = quantize(x, torch.tensor(1.0, device=device), E4M3, row)
    assert q.data.view(torch.uint8).tolist() == [0x7E, 0xC0, 0, 0, 2, 0x7F, 0x7F, 0x80]
    assert dict(zip(STATISTICS, row.tolist(), strict=True)) == {
        "numel": 8, "amax": 1e4, "scale": 1, "saturated": 1, "underflow": 2, "subnormal": 1, "nonfinite": 2
    }  # fmt: skip


@FORMATS
@BYTES
@pytest.mark.parametrize("scale", SCALES)
def test_every_bfloat16(device: torch.device, fmt: Format, as_bytes: bool, scale: float) -> None:
    assert_same(all_patterns(torch.bfloat16), device, scale, fmt, as_bytes=as_bytes)


@FORMATS
@BYTES
def test_every_bfloat16_unclamped(device: torch.device, fmt: Format, as_bytes: bool) -> None:
    assert_same(all_patterns(torch.bfloat16), device, 0.3, fmt, as_bytes=as_bytes, saturate=False)


@FORMATS
@BYTES
@pytest.mark.parametrize("saturate", [True, False], ids=["saturated", "unsaturated"])
def test_every_bfloat16_with_infinity_clamped(
    device: torch.device, fmt: Format, as_bytes: bool, saturate: bool
) -> None:
    x = all_patterns(torch.bfloat16)
    assert_same(x, device, 0.3, fmt, as_bytes=as_bytes, saturate=saturate, nonfinite="clamp")


@pytest.mark.parametrize("name", ["E3M2", "E2M1"])
def test_every_bfloat16_in_smaller_formats(device: torch.device, name: str) -> None:
    assert_same(all_patterns(torch.bfloat16), device, 0.3, DATA_FORMATS[name], as_bytes=False)


@FORMATS
def test_every_float16(device: torch.device, fmt: Format) -> None:
    assert_same(all_patterns(torch.float16), device, 17.0, fmt)


@pytest.mark.parametrize("fmt", DATA_FORMATS.values(), ids=DATA_FORMATS)
def test_every_tie_and_its_neighbours(device: torch.device, fmt: Format) -> None:
    values = torch.unique(fmt.table[torch.isfinite(fmt.table)])
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    x = torch.cat([points, *(torch.nextafter(points, torch.tensor(t)) for t in (-torch.inf, torch.inf))])
    assert_same(x, device, 1.0, fmt, as_bytes=False)


@pytest.mark.parametrize("fmt", DATA_FORMATS.values(), ids=DATA_FORMATS)
def test_only_more_than_the_next_float32_counts_as_saturated(device: torch.device, fmt: Format) -> None:
    upwards = torch.tensor(torch.inf)
    limit = torch.nextafter(torch.tensor(fmt.max), upwards)
    x = torch.stack((torch.tensor(fmt.max), limit, -limit, torch.nextafter(limit, upwards)))
    assert run("triton", x.to(device), 1.0, fmt, as_bytes=False)[1][STATISTICS.index("saturated")] == 1
    assert_same(x, device, 1.0, fmt, as_bytes=False)


def test_current_scaling_never_counts_as_saturated(device: torch.device) -> None:
    above = 0
    for seed in range(30):
        x = spread(3 * seed + 1, seed=seed)
        amax = x.abs().max()
        scale = amax_to_scale(amax, E4M3)
        above += int(amax * scale > E4M3.max)
        row = run("triton", x.to(device), scale.item(), E4M3, as_bytes=True)[1]
        assert row[STATISTICS.index("saturated")] == 0
    assert above > 0


def test_random_bits(device: torch.device) -> None:
    bits = torch.randint(-(2**31), 2**31, (130, 70), generator=torch.Generator().manual_seed(1))
    assert_same(bits.to(torch.int32).view(torch.float32), device, 1.0, E4M3)


def test_float64_is_rounded_to_float32_first(device: torch.device) -> None:
    assert_same(spread(5, 7).double() * (1 + 2**-30), device, 3.0, E4M3)


VIEWS = {
    "no dimensions": spread(1).squeeze(),
    "one element": spread(1, 1),
    "empty": torch.empty(0, 16),
    "odd": spread(3, 7, 11),
    "more than a tile": spread(4097),
    "transposed": spread(70, 130).t(),
    "every other row and column": spread(67, 131)[::2, 1::2],
    "every third element": spread(1000)[::3],
    "expanded": spread(5, 1).expand(5, 70),
    "of four dimensions, permuted": spread(2, 3, 4, 5).permute(3, 1, 0, 2),
    "one row of many": spread(9, 70)[4],
}


@BYTES
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_shapes_and_strides(device: torch.device, view: Tensor, as_bytes: bool) -> None:
    # Moving a view to another device makes it contiguous; moving what it is a view of does not.
    base = view.as_strided((view.untyped_storage().nbytes() // 4,), (1,), 0).to(device)
    there = base.as_strided(view.shape, view.stride(), view.storage_offset())
    assert_same(there, device, 3.0, E5M2, as_bytes=as_bytes)


@pytest.mark.parametrize("stride", [(2**30, 1), (1, 2**30)], ids=["rows", "columns"])
def test_elements_more_than_2_31_bytes_apart(device: torch.device, stride: tuple[int, int]) -> None:
    """Of the memory asked for only the few pages that hold the matrix are ever touched (on a CPU)."""
    # Not poisoned, which would touch all.
    torch.use_deterministic_algorithms(False)
    storage = torch.empty(5 * 2**29 + 200, dtype=torch.bfloat16, device=device)
    shape = (3, 70) if stride[1] == 1 else (70, 3)
    x = storage.as_strided(shape, stride)
    x.copy_(spread(*shape))
    assert_same(x, device, 3.0, E4M3)


@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (70, 3), (65, 130)])
@FORMATS
def test_the_transpose_holds_the_same(device: torch.device, shape: tuple[int, int], fmt: Format) -> None:
    assert fmt.dtype is not None
    set_backend("triton")
    x, s = spread(*shape).to(device), torch.tensor(3.0, device=device)
    alone = triton_backend.quantize(fmt.dtype, x, s, fmt)
    both = triton_backend.quantize(fmt.dtype, x, s, fmt, transpose=True)
    assert alone.transposed is None and both.transposed is not None
    assert both.transposed.is_contiguous()
    assert_same_bits(both.data, alone.data.cpu())
    assert_same_bits(both.transposed, alone.data.cpu().t().contiguous())


@pytest.mark.parametrize("fill", [0.0, torch.nan, torch.inf, -torch.inf, 1e-45, 3e38])
def test_measuring(device: torch.device, fill: float) -> None:
    x = torch.full((5000,), fill)
    x[::7] = spread(715)
    for part in (x, x[:1], x[1:2], x[:0]):
        set_backend("triton")
        actual = measure(part.to(device))
        set_backend("reference")
        expected = measure(part)
        assert actual.amax.dtype == torch.float32
        assert [value.item() for value in actual] == [value.item() for value in expected]


def test_rows_accumulate(device: torch.device) -> None:
    rows = []
    for backend, where in (("triton", device), ("reference", torch.device("cpu"))):
        set_backend(backend)  # type: ignore[arg-type]
        row = empty_row(where)
        for seed, scale in ((1, 3.0), (2, 300.0), (3, 0.5)):
            x = spread(70, 31, seed=seed).to(where)
            quantize(x, torch.tensor(scale, device=where), E4M3, row)
        quantize(torch.empty(0, 4, device=where), torch.tensor(7.0, device=where), E4M3, row)
        rows.append(row.tolist())
    assert rows[0] == rows[1]
    assert rows[0][STATISTICS.index("scale")] == 7


def test_what_was_measured_before_is_believed(device: torch.device) -> None:
    set_backend("triton")
    row, s = empty_row(device), torch.tensor(1.0, device=device)
    known = Extent(torch.tensor(123.0, device=device), torch.tensor(4.0, device=device))
    quantize(spread(9, 9).to(device), s, E4M3, row, extent=known)
    assert row[STATISTICS.index("amax")] == 123
    assert row[STATISTICS.index("nonfinite")] == 4


def test_nothing_is_measured_without_need(device: torch.device) -> None:
    x, s = spread(9, 9).to(device), torch.tensor(1.0, device=device)
    assert triton_backend.quantize(torch.bfloat16, x, s, E4M3).amax is None
    measured = triton_backend.quantize(torch.bfloat16, x, s, E4M3, measure=True).amax
    assert measured is not None and measured.item() == spread(9, 9).abs().max()


def test_a_row_that_kernels_cannot_write_is_refused(device: torch.device) -> None:
    set_backend("triton")
    x, s = spread(9).to(device), torch.tensor(1.0, device=device)
    with pytest.raises(ValueError, match=f"StatisticsBuffer with device='{device.type}"):
        quantize(x, s, E4M3, empty_row(device).float())
