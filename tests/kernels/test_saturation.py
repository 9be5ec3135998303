"""An element is saturated if it exceeds the next float32 above M. A scale M / amax never leads there."""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from kernels.helpers.values import empty_row
from torch import Tensor, nn

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    DATA_FORMATS,
    E4M3,
    E5M2,
    MXFP8,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Format,
    Fp8Linear,
    Recipe,
    RowwiseScaling,
    ScalingState,
    StatisticsBuffer,
    amax_to_block_scale,
    amax_to_scale,
    backends,
    convert,
    measure,
    observe,
    quantize,
    quantize_blocks,
    quantize_values,
    set_backend,
)
from fp8scope_kernels.optimizer_storage import FP16

SATURATED = STATISTICS.index("saturated")
SATURATED_BLOCKS = BLOCK_STATISTICS.index("saturated_blocks")
SIZES = (1, 2, 3, 17, 64, 1000, 4097)
SHAPES = ((1, 1), (3, 5), (16, 128), (130, 300))

BLOCKS: dict[str, tuple[Recipe, tuple[int, int]]] = {
    "rows": (RowwiseScaling(), (1, 0)),
    "1x128": (BlockScaling(power_of_two=False), (1, 128)),
    "128x128": (BlockScaling(power_of_two=False), (128, 128)),
}

formats = pytest.mark.parametrize("fmt", DATA_FORMATS.values(), ids=DATA_FORMATS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(params=["reference", "compiled"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(backends, "_cpu_failure", None)
    monkeypatch.setattr(backends, "_chosen", "auto")
    set_backend(request.param)
    yield request.param


def tensors(dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors of many sizes and magnitudes; in one in ten or so the scaled amax comes out above M."""
    generator = torch.Generator().manual_seed(1)
    for turn in range(20):
        for size in SIZES:
            yield (torch.randn(size, generator=generator) * 2.0 ** (turn - 10)).to(dtype)


def encoding_of(fmt: Format) -> Literal["ocp", "fnuz"]:
    return "fnuz" if fmt.name.endswith("FNUZ") else "ocp"


def neighbours(fmt: Format) -> Tensor:
    """The largest value and the next two float32 above it."""
    points = [torch.tensor(fmt.max)]
    for _ in range(2):
        points.append(torch.nextafter(points[-1], torch.tensor(torch.inf)))
    return torch.stack(points)


def test_it_works(backend: str) -> None:
    x = torch.tensor([1.7, -0.2])
    s, row = amax_to_scale(x[0], E4M3), empty_row()
    assert x[0] * s == 448.000030517578125
    assert quantize(x, s, E4M3, row).data[0].item() == 448
    assert row[SATURATED] == 0
    quantize(x, torch.nextafter(s, torch.tensor(torch.inf)), E4M3, row)
    assert row[SATURATED] == 1


@pytest.mark.parametrize("fmt", [*DATA_FORMATS.values(), FP16], ids=lambda fmt: fmt.name)
def test_the_bound_holds_for_every_significand(fmt: Format) -> None:
    """All 2^23 of them; and any exponent, with subnormals. Powers of two at or below s stay within M."""
    significands = (torch.arange(2**23, dtype=torch.int32) | 0x3F800000).view(torch.float32)
    anything = torch.randint(1, 0x7F800000, (2**20,), generator=torch.Generator().manual_seed(1))
    for amax in (significands, anything.to(torch.int32).view(torch.float32)):
        product = amax * amax_to_scale(amax, fmt)
        # Reached, so that no smaller limit would do.
        assert product.max() == fmt.limit
        assert 0.04 < (product > fmt.max).double().mean() < 0.16
        # Scales stop at float32's smallest normal number, where 2^128 times it is 4.
        assert all((amax * amax_to_scale(amax, fmt, margin=m)).max() <= fmt.max for m in (1, 3, 64))
        assert (amax * amax_to_scale(amax, fmt, power_of_two=True)).max() <= fmt.max
        assert (amax * amax_to_block_scale(amax, fmt, MXFP8())).max() <= fmt.max


@formats
@dtypes
def test_current_scaling_never_counts_saturation(backend: str, fmt: Format, dtype: torch.dtype) -> None:
    row, above = empty_row(), 0
    for x in tensors(dtype):
        extent = measure(x)
        s = ScalingState(CurrentScaling(fp8_encoding=encoding_of(fmt)), fmt).next_scale(extent.amax)
        above += int((x.float().abs() * s).max() > fmt.max)
        for known in (None, extent):
            quantize_values(x, s, fmt, row, extent=known)
        if fmt.dtype is not None:
            quantize(x, s, fmt, row)
    assert above > 0
    assert row[SATURATED] == 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_stochastic_rounding_never_counts_saturation(fmt: Format) -> None:
    row, above = empty_row(), 0
    for x in tensors(torch.float32):
        s = amax_to_scale(x.abs().max(), fmt)
        above += int((x.abs() * s).max() > fmt.max)
        quantize(x, s, fmt, row, stochastic=torch.Generator().manual_seed(1))
    assert above > 0
    assert row[SATURATED] == 0


@formats
@dtypes
@pytest.mark.parametrize(("recipe", "grid"), BLOCKS.values(), ids=BLOCKS)
def test_scales_per_block_never_count_saturation(
    backend: str, recipe: Recipe, grid: tuple[int, int], fmt: Format, dtype: torch.dtype
) -> None:
    row, block_row, above = empty_row(), torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64), 0
    generator = torch.Generator().manual_seed(2)
    for shape in SHAPES * 10:
        x = torch.randn(shape, generator=generator).to(dtype)
        scales = quantize_blocks(x, fmt, grid, recipe, row, block_row).scale
        height, width = grid[0], grid[1] or shape[1]
        of_each = scales[:, 0, :, 0].repeat_interleave(height, 0).repeat_interleave(width, 1)
        above += int((x.float().abs() * of_each[: shape[0], : shape[1]] > fmt.max).sum())
    assert above > 0
    assert row[SATURATED] == block_row[SATURATED_BLOCKS] == 0


@pytest.mark.parametrize(
    "recipe", [CurrentScaling(), RowwiseScaling(), BlockScaling(power_of_two=False)], ids=lambda r: r.kind
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "torch.compile"])
def test_healthy_layers_report_none(backend: str, recipe: Recipe, traced: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 48))
    convert(model, recipe)
    buffer = StatisticsBuffer()
    assert observe(model, buffer) == 6
    called = torch.compile(model, backend="aot_eager") if traced else model
    for seed in range(10):
        x = torch.randn(16, 48, generator=torch.Generator().manual_seed(seed))
        called(x).square().mean().backward()
    assert (buffer.data[:, STATISTICS.index("numel")] > 0).all()
    assert not buffer.data[:, SATURATED].any()
    assert not buffer.block_data[:, SATURATED_BLOCKS].any()


@formats
@pytest.mark.parametrize(("place", "counted"), [(0, 0), (1, 0), (2, 2)], ids=["M", "next", "the one after"])
def test_delayed_scaling_counts_from_two_above(backend: str, fmt: Format, place: int, counted: int) -> None:
    """With s = 1, from a past of M, neither M nor the next float32 counts, but the one after it does."""
    state = ScalingState(DelayedScaling(fp8_encoding=encoding_of(fmt)), fmt)
    row, value = empty_row(), neighbours(fmt)[place]
    state.next_scale(torch.tensor(fmt.max))
    x = torch.stack((value, -value, value / 3))
    s = state.next_scale(value)
    assert s == 1
    assert quantize_values(x, s, fmt, row)[:2].tolist() == [fmt.max, -fmt.max]
    assert row[SATURATED] == counted


@pytest.mark.parametrize(("place", "counted"), [(0, 0), (1, 0), (2, 256)], ids=["M", "next", "the one after"])
def test_a_layer_with_delayed_scaling_counts_grown_values(backend: str, place: int, counted: int) -> None:
    layer, buffer = Fp8Linear(16, 16, recipe=DelayedScaling()), StatisticsBuffer()
    observe(nn.Sequential(layer), buffer)
    layer(torch.full((16, 16), E4M3.max))
    buffer.zero_()
    layer(neighbours(E4M3)[place].expand(16, 16))
    assert buffer.data[0, STATISTICS.index("scale")] == 1
    assert buffer.data[0, SATURATED] == counted


@pytest.mark.parametrize(("place", "counted"), [(0, 0), (1, 0), (2, 1)], ids=["M", "next", "the one after"])
def test_blocks_count_from_two_above(backend: str, place: int, counted: int) -> None:
    """MX's own rule takes s = 1 for every amax from 256 to 512."""
    row, block_row = empty_row(), torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64)
    x = torch.ones(2, 32)
    x[1, 3] = -neighbours(E4M3)[place]
    q = quantize_blocks(x, E4M3, (1, 32), MXFP8(rounding="floor"), row, block_row)
    assert q.scale.flatten().tolist() == [256, 1]
    assert q.values[1, 3].item() == -448
    assert row[SATURATED] == block_row[SATURATED_BLOCKS] == counted
