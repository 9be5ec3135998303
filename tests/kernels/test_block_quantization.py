"""Block-wise quantisation against a brute-force loop over the blocks."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    E4M3,
    E5M2,
    MXFP8,
    STATISTICS,
    BlockScaling,
    CurrentScaling,
    Format,
    Recipe,
    RowwiseScaling,
    ScalingState,
    amax_to_mx_scale,
    backends,
    quantize_blocks,
)

CASES: dict[str, tuple[Recipe, tuple[int, int]]] = {
    "rows": (RowwiseScaling(), (1, 0)),
    "rows, power of two": (RowwiseScaling(power_of_two=True), (1, 0)),
    "1x128": (BlockScaling(), (1, 128)),
    "128x128, float32 scales": (BlockScaling(power_of_two=False), (128, 128)),
    "MX": (MXFP8(), (1, 32)),
    "MX, floor": (MXFP8(rounding="floor"), (1, 32)),
}
cases = pytest.mark.parametrize(("recipe", "grid"), CASES.values(), ids=CASES)
shapes = pytest.mark.parametrize("shape", [(128, 256), (3, 5), (1, 1), (130, 70), (1, 300)])
WITNESSES = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


def block_scale(amax: float, fmt: Format, recipe: Recipe) -> np.float32:
    """The definitions in float64, rounded once."""
    if amax == 0:
        return np.float32(1)
    if isinstance(recipe, MXFP8) and recipe.rounding == "floor":
        return np.float32(2.0 ** (fmt.max_exponent - math.floor(math.log2(amax))))
    if isinstance(recipe, MXFP8) or getattr(recipe, "power_of_two", False):
        return np.float32(2.0 ** math.floor(math.log2(fmt.max / amax)))
    return np.float32(fmt.max / amax)


def brute_force(
    x: NDArray[np.float32], fmt: Format, recipe: Recipe, grid: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32], dict[str, float], dict[str, float]]:
    """q, each element's scale, and both kinds of statistics, one block after another."""
    height, width = grid[0] or x.shape[0], grid[1] or x.shape[1]
    q, scales, saturated_blocks, used = np.empty_like(x), np.empty_like(x), 0, []
    total = dict.fromkeys(STATISTICS, 0.0)
    limit = np.nextafter(np.float32(fmt.max), np.float32(np.inf))
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            where = (slice(top, top + height), slice(left, left + width))
            block = x[where]
            finite = np.isfinite(block)
            scale = block_scale(float(np.abs(block[finite]).max(initial=0.0)), fmt, recipe)
            scaled = block * scale
            q[where] = np.clip(scaled, -fmt.max, fmt.max).astype(WITNESSES[fmt.name]).astype(np.float32)
            q[where][np.isinf(block)] = np.nan
            scales[where] = scale
            saturated = int((finite & (np.abs(scaled) > limit)).sum())
            saturated_blocks += saturated > 0
            used.append(float(scale))
            total["saturated"] += saturated
            total["underflow"] += ((block != 0) & (q[where] == 0)).sum()
            total["subnormal"] += ((q[where] != 0) & (np.abs(q[where]) < fmt.smallest_normal)).sum()
            total["nonfinite"] += (~finite).sum()
    total["numel"] = x.size
    total["amax"] = np.abs(x[np.isfinite(x)]).max(initial=0.0)
    # torch's median of an even number of values is the lower of the middle two.
    median = sorted(used)[(len(used) - 1) // 2]
    total["scale"] = median
    blocks = dict(
        zip(BLOCK_STATISTICS, (len(used), saturated_blocks, min(used), median, max(used)), strict=True)
    )
    return q, scales, total, blocks


def spread(*shape: int, seed: int = 1) -> Tensor:
    """Values over many powers of two, so that every counter has something to count."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-20, 20, shape, generator=generator).float()
    )


def run(
    x: Tensor, fmt: Format, recipe: Recipe, grid: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row = torch.zeros(len(STATISTICS), dtype=torch.float64)
    block_row = torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64)
    quantized = quantize_blocks(x, fmt, grid, recipe, row, block_row)
    return quantized.values, quantized.dequantize(), row, block_row


def test_it_works() -> None:
    x = torch.tensor([[1.0, 0.5], [100.0, 3.0]])
    quantized = quantize_blocks(x, E4M3, (1, 0), RowwiseScaling())
    assert quantized.values.tolist() == [[448.0, 224.0], [448.0, 13.0]]
    assert quantized.scale.flatten().tolist() == [448.0, pytest.approx(4.48)]
    torch.testing.assert_close(quantized.dequantize(), x, rtol=2**-4, atol=0)


@cases
@shapes
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_against_brute_force(
    recipe: Recipe, grid: tuple[int, int], shape: tuple[int, int], fmt: Format
) -> None:
    x = spread(*shape)
    values, dequantized, row, block_row = run(x, fmt, recipe, grid)
    q, scales, total, blocks = brute_force(x.numpy(), fmt, recipe, grid)
    np.testing.assert_array_equal(values.float().numpy(), q)
    np.testing.assert_array_equal(dequantized.numpy(), q / scales)
    assert dict(zip(STATISTICS, row.tolist(), strict=True)) == total
    assert dict(zip(BLOCK_STATISTICS, block_row.tolist(), strict=True)) == blocks


@cases
def test_non_finite_elements_do_not_affect_their_block(recipe: Recipe, grid: tuple[int, int]) -> None:
    x = spread(4, 256)
    x[0, 3], x[1, 200], x[2, 7] = torch.nan, torch.inf, -torch.inf
    x[3] = 0
    values, _, row, _ = run(x, E4M3, recipe, grid)
    q, _, total, _ = brute_force(x.numpy(), E4M3, recipe, grid)
    np.testing.assert_array_equal(values.float().numpy(), q)
    assert total["nonfinite"] == 3
    assert dict(zip(STATISTICS, row.tolist(), strict=True)) == total


@cases
def test_an_empty_matrix(recipe: Recipe, grid: tuple[int, int]) -> None:
    values, dequantized, row, block_row = run(torch.empty(0, 64), E4M3, recipe, grid)
    assert values.shape == dequantized.shape == (0, 64)
    assert torch.count_nonzero(row) == torch.count_nonzero(block_row) == 0


@cases
def test_a_transposed_view_and_bfloat16(recipe: Recipe, grid: tuple[int, int]) -> None:
    x = spread(256, 130).bfloat16()
    expected = run(x.t().contiguous().float(), E4M3, recipe, grid)
    for actual, wanted in zip(run(x.t(), E4M3, recipe, grid), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("recipe", [BlockScaling(), MXFP8()], ids=["1x128", "MX"])
def test_powers_of_two_are_exact_in_bfloat16(recipe: Recipe) -> None:
    x = spread(16, 256)
    quantized = quantize_blocks(x, E4M3, recipe.block_of("input") or (1, 0), recipe)
    assert torch.equal(quantized.dequantize(torch.bfloat16).float(), quantized.dequantize())


def test_only_the_rule_of_the_specification_saturates() -> None:
    x = torch.full((1, 32), 500.0)
    row = run(x, E4M3, MXFP8(rounding="floor"), (1, 32))[2]
    assert row[STATISTICS.index("saturated")] == 32
    row = run(x, E4M3, MXFP8(), (1, 32))[2]
    assert row[STATISTICS.index("saturated")] == 0


@pytest.mark.parametrize("rounding", ["up", "floor"])
def test_mx_scales_fit_into_e8m0(rounding: str) -> None:
    amax = torch.tensor([0.0, 1e-45, 1e-38, 1.0, 448.0, 449.0, 3e38])
    scale = amax_to_mx_scale(amax, E4M3, rounding)
    shared = scale.double().reciprocal()
    assert torch.equal(shared.float().to(torch.float8_e8m0fnu).double(), shared)
    assert scale[0] == 1


def test_blocks_need_no_state() -> None:
    with pytest.raises(TypeError, match="MXFP8 has a scale per block"):
        ScalingState(MXFP8(), E4M3).next_scale(torch.tensor(1.0))


def test_recipes_name_their_blocks() -> None:
    assert CurrentScaling().block_of("weight") is None
    assert RowwiseScaling().block_of("grad_output") == (1, 0)
    assert BlockScaling().block_of("weight") == (128, 128)
    assert BlockScaling().block_of("input") == (1, 128)
    assert MXFP8().block_of("input") == (1, 32)
    for recipe in (CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8()):
        with pytest.raises(ValueError, match="role must be one of"):
            recipe.block_of("output")  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", [RowwiseScaling, BlockScaling, MXFP8])
def test_block_recipes_always_saturate(recipe: type[Recipe]) -> None:
    with pytest.raises(ValueError, match="always saturates"):
        recipe(saturate=False)


@cases
@pytest.mark.parametrize("shape", [(300, 700), (5, 4100), (2100, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_has_the_same_bits_and_counts(
    recipe: Recipe, grid: tuple[int, int], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = spread(*shape).to(dtype)
    x[0, 0], x[-1, -1], x[shape[0] // 2, 1] = torch.nan, -torch.inf, 0.0
    before, results = backends.get_backend(), []
    try:
        choices: tuple[backends.Backend, ...] = ("reference", "compiled")
        for backend in choices:
            backends.set_backend(backend)
            stored = quantize_blocks(x, E4M3, grid, recipe, dtype=torch.float8_e4m3fn)
            # Any NaN for any NaN, but else the same byte, the sign of zero included.
            data = stored.values.view(torch.uint8).masked_fill(stored.values.float().isnan(), 0x7F)
            results.append((*run(x, E4M3, recipe, grid), data, stored.dequantize()))
    finally:
        backends.set_backend(before)
    for expected, actual in zip(*results, strict=True):
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))


@cases
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_backends_on_random_bits(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, grid: tuple[int, int], fmt: Format, dtype: torch.dtype
) -> None:
    """Blocks with and without NaN and Inf, of subnormals or zeros only; more than are worked on together."""
    monkeypatch.setattr(backends, "_cpu_failure", None)
    bits = torch.randint(-(2**31), 2**31, (131, 4300), generator=torch.Generator().manual_seed(3))
    # Rows of subnormals, of zeros, and of numbers below 2.
    bits[3:40] &= 0x807FFFFF - 2**32
    bits[40:44] = 0
    bits[44:90] &= 0xBFFFFFFF - 2**32
    x = bits.to(torch.int32).view(torch.float32).to(dtype)
    results = []
    for backend in ("compiled", "reference"):
        monkeypatch.setattr(backends, "_chosen", backend)
        values, _, row, block_row = run(x, fmt, recipe, grid)
        results.append((values, quantize_blocks(x, fmt, grid, recipe).scale, row, block_row))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(actual.isnan(), expected.isnan())
    assert results[0][2][STATISTICS.index("nonfinite")] > 0


def test_refuses_a_dtype_of_another_format() -> None:
    with pytest.raises(ValueError, match=r"E4M3 is stored as bfloat16 or in its own dtype, not as .*e5m2"):
        quantize_blocks(torch.ones(2, 2), E4M3, (1, 0), RowwiseScaling(), dtype=torch.float8_e5m2)


@cases
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(130, 300), (3, 5), (1, 1), (0, 7)])
def test_both_backends_dequantise_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int],
    fmt: Format,
    recipe: Recipe,
    grid: tuple[int, int],
) -> None:
    monkeypatch.setattr(backends, "_cpu_failure", None)
    x = spread(*shape)
    if x.numel() > 100:
        x[0, 3], x[1, 150], x[2, 7] = torch.nan, torch.inf, -torch.inf
        x[3], x[4], x[5], x[6] = 0, 1e-45, 3e38, torch.nan
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        results = []
        for backend in ("compiled", "reference"):
            monkeypatch.setattr(backends, "_chosen", backend)
            results.append(quantize_blocks(x, fmt, grid, recipe).dequantize(dtype))
        assert results[0].dtype == dtype
        assert torch.equal(results[0].isnan(), results[1].isnan())
        assert torch.equal(results[0].nan_to_num(7.0), results[1].nan_to_num(7.0))


@pytest.mark.parametrize("shape", [(16, 0), (0, 16)])
def test_an_empty_matrix_has_a_scale_for_each_row(shape: tuple[int, int]) -> None:
    """A product of no tokens reads a scale for each of its rows."""
    quantized = quantize_blocks(torch.empty(shape), E4M3, (1, 0), RowwiseScaling())
    assert quantized.scale.shape == (max(shape[0], 1), 1, 1, 1)
    assert quantized.dequantize().shape == shape
