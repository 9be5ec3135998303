"""The Triton kernel for scales per block against the definition on the CPU: bit for bit, count for count."""

import dataclasses

import pytest
import torch
from torch import Tensor

from fp8scope_kernels import (
    BLOCK_STATISTICS,
    E4M3,
    E5M2,
    MXFP8,
    STATISTICS,
    BlockScaling,
    Format,
    Recipe,
    RowwiseScaling,
    quantize_blocks,
    set_backend,
)
from fp8scope_kernels.triton import backend as triton_backend

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[Recipe, tuple[int, int]]] = {
    "rows": (RowwiseScaling(), (1, 0)),
    "rows, powers of two": (RowwiseScaling(power_of_two=True), (1, 0)),
    "1x128": (BlockScaling(power_of_two=False), (1, 128)),
    "128x128": (BlockScaling(), (128, 128)),
    "MX": (MXFP8(), (1, 32)),
    "MX, floor": (MXFP8(rounding="floor"), (1, 32)),
}
cases = pytest.mark.parametrize(("recipe", "grid"), CASES.values(), ids=CASES)


def spread(*shape: int, seed: int = 1) -> Tensor:
    """Values over many powers of two, so that every counter has something to count."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())


def run(
    backend: str, x: Tensor, fmt: Format, recipe: Recipe, grid: tuple[int, int]
) -> tuple[Tensor, Tensor, list[float], list[float]]:
    set_backend(backend)  # type: ignore[arg-type]
    row = torch.zeros(len(STATISTICS), dtype=torch.float64, device=x.device)
    block_row = torch.zeros(len(BLOCK_STATISTICS), dtype=torch.float64, device=x.device)
    for _ in range(2):  # the second call adds to what the first wrote
        quantized = quantize_blocks(x, fmt, grid, recipe, row, block_row)
    return quantized.values.cpu(), quantized.scale.cpu(), row.tolist(), block_row.tolist()


def assert_same(x: Tensor, device: torch.device, fmt: Format, recipe: Recipe, grid: tuple[int, int]) -> None:
    """`x` on the CPU, or already where it is to be quantised."""
    there = x if x.device == device else x.to(device)
    values, scale, row, block_row = run("triton", there, fmt, recipe, grid)
    expected, expected_scale, expected_row, expected_block_row = run("reference", x.cpu(), fmt, recipe, grid)
    number = ~expected.isnan()
    assert torch.equal(~values.isnan(), number)
    assert torch.equal(values.view(torch.int16)[number], expected.view(torch.int16)[number])
    assert torch.equal(scale, expected_scale)
    assert row == expected_row
    assert block_row == expected_block_row


@cases
def test_it_works(device: torch.device, recipe: Recipe, grid: tuple[int, int]) -> None:
    resolved = (grid[0], grid[1] or 300)
    x = spread(130, 300)
    assert triton_backend.takes_grid(resolved)
    assert_same(x, device, E4M3, recipe, grid)


@cases
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (129, 5)])
def test_blocks_of_odd_shapes(
    device: torch.device, recipe: Recipe, grid: tuple[int, int], shape: tuple[int, int]
) -> None:
    assert_same(spread(*shape), device, E5M2, recipe, grid)


def test_rows_longer_than_a_tile(device: torch.device) -> None:
    assert_same(spread(5, 2100), device, E4M3, RowwiseScaling(), (1, 0))


def test_scales_per_block_never_count_as_saturated(device: torch.device) -> None:
    above = 0
    for recipe, grid in (CASES["rows"], CASES["1x128"], (BlockScaling(power_of_two=False), (128, 128))):
        for seed in range(5):
            x = spread(33, 300, seed=seed)
            _, scale, row, block_row = run("triton", x.to(device), E4M3, recipe, grid)
            resolved = (min(grid[0], 33), grid[1] or 300)
            of_each = scale[:, 0, :, 0].repeat_interleave(resolved[0], 0).repeat_interleave(resolved[1], 1)
            above += int((x.abs() * of_each[:33, :300] > E4M3.max).sum())
            assert row[STATISTICS.index("saturated")] == 0
            assert block_row[BLOCK_STATISTICS.index("saturated_blocks")] == 0
    assert above > 0


@pytest.mark.parametrize(("units", "counted"), [(0, 0), (1, 0), (2, 1)])
def test_blocks_count_from_two_units_above_the_largest(
    device: torch.device, units: int, counted: int
) -> None:
    """The rule of the specification takes s = 1 for every amax from 256 to 512."""
    x = torch.ones(2, 32)
    x[1, 3] = -(E4M3.max + 2**-15 * units)
    recipe, grid = CASES["MX, floor"]
    _, _, row, block_row = run("triton", x.to(device), E4M3, recipe, grid)
    # Both of `run`'s calls add to the rows.
    assert row[STATISTICS.index("saturated")] == 2 * counted
    assert block_row[BLOCK_STATISTICS.index("saturated_blocks")] == 2 * counted


@cases
def test_an_empty_matrix(device: torch.device, recipe: Recipe, grid: tuple[int, int]) -> None:
    assert_same(torch.empty(0, 64), device, E4M3, recipe, grid)


@cases
def test_bad_elements_and_extremes(device: torch.device, recipe: Recipe, grid: tuple[int, int]) -> None:
    x = spread(7, 160)
    x[0, 3], x[1, 150], x[2, 7] = torch.nan, torch.inf, -torch.inf
    x[3], x[4], x[5], x[6] = 0, 1e-45, 3e38, torch.nan
    assert_same(x, device, E4M3, recipe, grid)
    assert_same(x, device, E4M3, dataclasses.replace(recipe, nonfinite="clamp"), grid)


@cases
def test_a_transposed_view_in_bfloat16(device: torch.device, recipe: Recipe, grid: tuple[int, int]) -> None:
    assert_same(spread(150, 140).bfloat16().to(device).t(), device, E4M3, recipe, grid)


@pytest.mark.parametrize("grid", [(3, 32), (256, 4)])
def test_other_block_heights_use_the_reference(device: torch.device, grid: tuple[int, int]) -> None:
    x = spread(10, 70)
    assert not triton_backend.takes_grid(grid)
    assert_same(x, device, E4M3, BlockScaling(), grid)


def test_elements_more_than_2_31_bytes_apart(device: torch.device) -> None:
    torch.use_deterministic_algorithms(False)  # which would touch all of the memory to poison it
    storage = torch.empty(5 * 2**29 + 200, dtype=torch.bfloat16, device=device)
    x = storage.as_strided((3, 70), (2**30, 1))
    x.copy_(spread(3, 70))
    assert_same(x, device, E4M3, MXFP8(), (1, 32))
