"""The compiled backend: the same bits and counts as the definition."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels.helpers.values import all_bfloat16
from torch import Tensor

from fp8scope_kernels import (
    DATA_FORMATS,
    E4M3,
    E5M2,
    STATISTICS,
    Format,
    amax_to_scale,
    backends,
    get_backend,
    measure,
    quantize,
    quantize_values,
    set_backend,
)
from fp8scope_kernels.backends import Backend
from fp8scope_kernels.cpu import backend as cpu_backend

formats = pytest.mark.parametrize("fmt", DATA_FORMATS.values(), ids=DATA_FORMATS)
SIGN = {1: torch.uint8, 2: torch.int16}


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_cpu_failure", None)
    monkeypatch.setattr(backends, "_chosen", "auto")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(backend: Backend, make: Any, x: Tensor, scale: float, fmt: Format) -> tuple[Tensor, list[float]]:
    set_backend(backend)
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    result = make(x, torch.tensor(scale), fmt, row)
    assert get_backend() == backend
    return (result if isinstance(result, Tensor) else result.data), row.tolist()


def assert_same(make: Any, x: Tensor, scale: float, fmt: Format) -> None:
    """The same bits, the sign of zero included, but any NaN for any NaN."""
    data, row = run("compiled", make, x, scale, fmt)
    expected, expected_row = run("reference", make, x, scale, fmt)
    nan = expected.float().isnan()
    assert torch.equal(data.float().isnan(), nan)
    bits = SIGN[data.dtype.itemsize]
    assert torch.equal(data.view(bits).masked_fill(nan, 0), expected.view(bits).masked_fill(nan, 0))
    assert row == expected_row


def spread(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-20, 20, shape, generator=generator).float()
    return torch.randn(shape, generator=generator) * torch.exp2(powers)


def test_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = cpu_backend.quantize

    def noting(x: Tensor, *rest: Any, **options: Any) -> cpu_backend.Quantized:
        sizes.append(x.numel())
        return original(x, *rest, **options)

    monkeypatch.setattr(cpu_backend, "quantize", noting)
    assert_same(quantize_values, torch.linspace(-3, 3, 8192).view(64, 128), 100.0, E4M3)
    assert sizes == [8192]
    assert not backends.failures()


@formats
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**13, 3.4028234663852886e38, 1.1754943508222875e-38])
def test_all_bfloat16(fmt: Format, scale: float) -> None:
    assert_same(quantize_values, all_bfloat16(), scale, fmt)
    if fmt.dtype is not None:
        assert_same(quantize, all_bfloat16(), scale, fmt)


@formats
def test_every_tie_and_its_neighbours(fmt: Format) -> None:
    values = torch.unique(fmt.table[torch.isfinite(fmt.table)])
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    x = torch.cat([points, *(torch.nextafter(points, torch.tensor(t)) for t in (-torch.inf, torch.inf))])
    assert_same(quantize_values, x.repeat(20), 1.0, fmt)
    if fmt.dtype is not None:
        assert_same(quantize, x.repeat(20), 1.0, fmt)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 63, 65, 4095, 4096, 4097, 3 * 4096 + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sizes_around_the_blocks_of_the_loop(size: int, dtype: torch.dtype) -> None:
    x = spread(size).to(dtype)
    for make in (quantize, quantize_values):
        assert_same(make, x, 3.0, E5M2)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(threads: int, dtype: torch.dtype) -> None:
    """Three threads' worth of elements, all of the same kind, so that a pool that overflows is seen."""
    torch.set_num_threads(threads)
    size = 3 * cpu_backend.ELEMENTS_PER_THREAD + 5
    for value in (0.0, 2.0**-30, 2.0**-7, 1e9):
        assert_same(quantize, torch.full((size,), value, dtype=dtype), 1.0, E4M3)
    assert_same(quantize_values, spread(size).to(dtype), 1.0, E4M3)


def test_random_bits_and_a_view_that_is_not_contiguous() -> None:
    bits = torch.randint(-(2**31), 2**31, (300, 100), generator=torch.Generator().manual_seed(1))
    x = bits.to(torch.int32).view(torch.float32)
    for view in (x, x.t()[::2]):
        assert_same(quantize_values, view, 1.0, E4M3)
        assert_same(quantize, view, 1.0, E5M2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spoilt", [False, True])
def test_measure(dtype: torch.dtype, spoilt: bool) -> None:
    x = torch.randn(100, 77, generator=torch.Generator().manual_seed(1)).to(dtype)
    if spoilt:
        x[3, 4], x[50, 6], x[-1, -1] = torch.nan, -torch.inf, torch.inf
    extents = []
    backends_in_turn: tuple[Backend, ...] = ("compiled", "reference")
    for backend in backends_in_turn:
        set_backend(backend)
        amax, nonfinite = measure(x)
        assert amax.dtype == torch.float32
        extents.append((amax.item(), nonfinite.item()))
    assert extents[0] == extents[1]
    assert extents[0][1] == (3 if spoilt else 0)


def test_one_pass_can_measure_too() -> None:
    x = spread(10_000).bfloat16()
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    amax = x.abs().max().item()
    result = cpu_backend.quantize(x, 1.0, E4M3, torch.bfloat16, row)
    counted = cpu_backend.quantize(x, 1.0, E4M3, torch.bfloat16, row, (amax, 0))
    assert result.amax == counted.amax == amax
    assert result[2:] == counted[2:]
    assert 0 not in (result.underflow, result.subnormal, result.saturated)
    x[5_000], x[9_999] = torch.nan, -torch.inf
    measured = cpu_backend.quantize(x, 1.0, E4M3, torch.bfloat16, measure=True)
    assert (measured.amax, measured.nonfinite) == (amax, 2)
    plain = cpu_backend.quantize(x, 1.0, E4M3, torch.bfloat16)
    assert plain[1:] == (0,) * 5
    assert torch.equal(plain.data.view(torch.int16), measured.data.view(torch.int16))


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_measured_beforehand_or_in_the_same_pass(spoilt: bool, scale: float) -> None:
    set_backend("compiled")
    x = torch.randn(5_000, generator=torch.Generator().manual_seed(1))
    x[0] = 5.0
    if spoilt:
        x[7], x[4_500] = torch.nan, -torch.inf
    rows = torch.zeros(2, len(STATISTICS), dtype=torch.float64)
    quantize(x, torch.tensor(scale), E4M3, rows[0])
    quantize(x, torch.tensor(scale), E4M3, rows[1], extent=measure(x))
    assert torch.equal(rows[0], rows[1])
    assert rows[0, STATISTICS.index("nonfinite")] == (2 if spoilt else 0)
    assert (rows[0, STATISTICS.index("saturated")] > 0) == (scale > 1)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("rounded", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("measured", [False, True])
def test_the_largest_element_at_the_boundary(backend: Backend, rounded: Format, measured: bool) -> None:
    """s is rounded, so that amax * s may be one unit of float32 above M: that is not counted, two units are.

    With the next larger s it is two units above in some. What counts is the float32 product, which is what is
    clamped.
    """
    set_backend(backend)
    row, expected, above = torch.zeros(2, len(STATISTICS), dtype=torch.float64), 0, 0
    limit = torch.nextafter(torch.tensor(rounded.max), torch.tensor(torch.inf))
    for amax in torch.rand(500, generator=torch.Generator().manual_seed(1)):
        scale = amax_to_scale(amax, rounded)
        product = amax * scale
        assert rounded.max * (1 - 2**-23) <= product <= rounded.max * (1 + 2**-23)
        larger = torch.nextafter(scale, torch.tensor(torch.inf))
        above += int(product > rounded.max)
        expected += int(amax * larger > limit)
        x = amax.reshape(1)
        for s, into in ((scale, row[0]), (larger, row[1])):
            q = quantize(x, s, rounded, into, extent=measure(x) if measured else None)
            assert q.data.float().item() == rounded.max
    assert above > 0
    assert 0 < expected < 500
    assert row[:, STATISTICS.index("saturated")].tolist() == [0, expected]


@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_powers_of_two_never_saturate_the_largest(backend: Backend) -> None:
    set_backend(backend)
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    points = torch.rand(200, generator=torch.Generator().manual_seed(2))
    edges = torch.tensor([448.0, 1.75, 1.75 - 2**-23, 1.75 + 2**-22])
    for amax in torch.cat((points, edges)):
        quantize(amax.reshape(1), amax_to_scale(amax, E4M3, power_of_two=True), E4M3, row)
    assert row[STATISTICS.index("saturated")] == 0


def test_without_a_row_the_values_are_the_same() -> None:
    x, scale = all_bfloat16(), torch.tensor(0.3)
    set_backend("compiled")
    counted = quantize_values(x, scale, E5M2, torch.zeros(len(STATISTICS), dtype=torch.float64))
    uncounted = quantize_values(x, scale, E5M2)
    assert torch.equal(uncounted.view(torch.int16), counted.view(torch.int16))


def test_does_not_disturb_autograd() -> None:
    set_backend("compiled")
    x = torch.linspace(-3, 3, 8192, requires_grad=True)
    assert not quantize_values(x, torch.tensor(1.0), E4M3).requires_grad
