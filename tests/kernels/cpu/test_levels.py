"""Every level's library computes the same bits: those of the lowest, and of the definition in eager torch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.helpers.values import all_bfloat16
from torch import Tensor

from fp8scope_kernels import (
    DATA_FORMATS,
    E2M1,
    E4M3,
    E5M2,
    MXFP4,
    MXFP8,
    NVFP4,
    SAMPLE_SIZE,
    BlockScaling,
    Format,
    RandomStream,
    RowwiseScaling,
    backends,
    exponent_histogram,
    measure,
    quantize,
    quantize_blocks,
    quantize_values,
)
from fp8scope_kernels.block_quantization import round_blocks
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.cpu import levels as cpu_levels
from fp8scope_kernels.cpu import library as cpu_library
from fp8scope_kernels.hadamard import rotate
from fp8scope_kernels.recipes import Block, Nonfinite, Recipe

LEVELS = [level.name for level in cpu_library.available_levels()]
levels = pytest.mark.parametrize("level", LEVELS)


def at(level: str, compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What the library of a level computes; `reference` is eager torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_cpu_failure", None)
        patch.setattr(backends, "_chosen", "reference" if level == "reference" else "compiled")
        if level != "reference":
            loaded = cpu_library.load(level)
            patch.setattr(cpu_backend, "library", lambda: loaded)
        return compute()


def assert_same_bits(seen: list[Tensor], expected: list[Tensor]) -> None:
    """NaNs may differ in their sign; everything else in nothing."""
    assert len(seen) == len(expected) > 0
    for one, other in zip(seen, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        nan = other.double().isnan()
        assert torch.equal(one.double().isnan(), nan)
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[other.dtype.itemsize]
        assert torch.equal(one.view(width).masked_fill(nan, 0), other.view(width).masked_fill(nan, 0))


def random_float32(*shape: int) -> Tensor:
    """Numbers of every exponent, some zeros, no other than finite."""
    draw = torch.Generator().manual_seed(11)
    x = torch.randn(shape, generator=draw) * torch.exp2(torch.randint(-40, 40, shape, generator=draw).float())
    return x.masked_fill(torch.rand(shape, generator=draw) < 0.05, 0.0)


@levels
@pytest.mark.parametrize("format", DATA_FORMATS.values(), ids=DATA_FORMATS)
def test_it_works(level: str, format: Format) -> None:
    def compute() -> list[Tensor]:
        results = []
        for x in (all_bfloat16(), random_float32(3 * 4096 + 77)):
            for scale in (1.0, 0.3, 2.0**13):
                row = torch.zeros(7, dtype=torch.float64)
                results.append(quantize_values(x, torch.tensor(scale), format, row))
                if format.dtype is not None:
                    results.append(quantize(x, torch.tensor(scale), format, row).data)
                results.append(row)
        return results

    assert_same_bits(at(level, compute), at("reference", compute))


FEATURES = {
    "x86-64-v2": {"ssse3", "sse4_1", "sse4_2", "popcnt"},
    "x86-64-v3": {"fma", "avx2", "bmi1", "bmi2"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the features are read from /proc/cpuinfo")
def test_selects_the_highest_level_of_the_processor() -> None:
    """As Linux names its features, whichever compiler built the library."""
    (flags, *_) = re.findall(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    expected = []
    for level in cpu_levels.levels():
        if not FEATURES.get(level.name, set()) <= set(flags.split()):
            break
        expected.append(level.name)
    assert expected == LEVELS


@levels
@pytest.mark.parametrize("nonfinite", ["propagate", "clamp"])
@pytest.mark.parametrize("format", DATA_FORMATS.values(), ids=DATA_FORMATS)
def test_rounding_at_random(level: str, format: Format, nonfinite: Nonfinite) -> None:
    """Every BF16 pattern, and numbers in every part of a group of words; the rows count what was rounded."""

    def compute() -> list[Tensor]:
        stream, results = RandomStream(2**63 + 5), []
        stream.state[1] = 2**32 - 2
        for x in (all_bfloat16(), random_float32(3 * 4096 + 77), random_float32(66, 5).half().t()):
            for scale in (1.0, 0.3, 3e38):
                row, s = torch.zeros(7, dtype=torch.float64), torch.tensor(scale)
                options: dict[str, Any] = {"stochastic": stream, "nonfinite": nonfinite}
                results.append(quantize_values(x, s, format, row, **options))
                if format.dtype is not None:
                    results.append(quantize(x, s, format, row, extent=measure(x), **options).data)
                    results.append(quantize(x, s, format, **options).data)
                results += [row, stream.state.clone()]
        return results

    assert_same_bits(at(level, compute), at("reference", compute))


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_histograms_of_exponents(level: str, dtype: torch.dtype) -> None:
    def compute() -> list[Tensor]:
        every = torch.exp2(torch.arange(-150, 128).double()).repeat(17)
        odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -3e-42, 3e38])
        matrix = random_float32(130, 333).to(dtype)
        cases = (every, odd, torch.empty(0), torch.tensor(3.0), matrix)
        return [exponent_histogram(x.to(dtype)) for x in cases] + [exponent_histogram(matrix.t())]

    assert_same_bits(at(level, compute), at("reference", compute))


@levels
@pytest.mark.parametrize(
    ("recipe", "grid"),
    [
        (MXFP8(), (1, 32)),
        (MXFP8(rounding="floor"), (1, 32)),
        (BlockScaling(), (1, 128)),
        (BlockScaling(power_of_two=False), (128, 128)),
    ],
    ids=["up", "floor", "1x128", "128x128"],
)
def test_blocks(level: str, recipe: Recipe, grid: Block) -> None:
    def compute() -> list[Tensor]:
        results = []
        for x in (random_float32(130, 333), random_float32(130, 333).bfloat16()):
            row, blocks = torch.zeros(7, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
            q = quantize_blocks(x, E4M3, grid, recipe, row, blocks)
            results += [q.values, q.dequantize(torch.float32), row, blocks]
        return results

    assert_same_bits(at(level, compute), at("reference", compute))


FOUR_BITS: tuple[tuple[Recipe, Block], ...] = (
    (NVFP4(), (1, 16)),
    (NVFP4(), (16, 16)),
    (MXFP4(), (1, 32)),
)


@levels
def test_four_bits(level: str) -> None:
    def compute() -> list[Tensor]:
        stream, results = RandomStream(4), []
        for x in (random_float32(50, 4333), random_float32(50, 77).bfloat16(), random_float32(60, 50).t()):
            for recipe, grid in FOUR_BITS:
                for stochastic in (False, stream) if grid[0] == 1 else (False,):
                    row, blocks = torch.zeros(7, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
                    q = quantize_blocks(x, E2M1, grid, recipe, row, blocks, stochastic=stochastic)
                    results += [q.values, q.scale, q.dequantize(), row, blocks]
            results.append(rotate(x))
        return results

    # Where a value is flushed, rounding by sums makes +0 and by words keeps the sign.
    assert_same_bits([x + 0 for x in at(level, compute)], [x + 0 for x in at("reference", compute)])


@levels
@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096, 3 * 4096 + 77])
def test_samples_are_summed_in_the_same_order(level: str, size: int) -> None:
    def compute() -> list[Tensor]:
        results = []
        for x in (random_float32(size), random_float32(size).bfloat16()):
            sample = torch.zeros(SAMPLE_SIZE, dtype=torch.float64)
            values = (x * 3.0).to(torch.bfloat16)
            cpu_backend.accumulate_sample(sample, x, values, torch.tensor(1 / 3))
            results.append(sample)
        return results

    assert_same_bits(at(level, compute), at(LEVELS[0], compute))


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_scales(level: str, dtype: torch.dtype) -> None:
    product, left, right = random_float32(37, 333).bfloat16(), random_float32(37, 1), random_float32(1, 333)
    amaxes = [*random_float32(300).abs().tolist(), torch.inf, torch.nan, 1e-45, 3.4e38]

    def by_level() -> list[Tensor]:
        scales = [cpu_backend.choose_scale(amax, E5M2.max, bool(i % 2), 7.0) for i, amax in enumerate(amaxes)]
        return [cpu_backend.scale_product(product, left, right, dtype), torch.tensor(scales)]

    seen = at(level, by_level)
    assert_same_bits(seen, at(LEVELS[0], by_level))
    assert_same_bits(seen[:1], [(product.float() * left * right).to(dtype)])


TURNED: dict[str, tuple[Recipe, Block]] = {
    "rows": (RowwiseScaling(), (1, 0)),
    "rows, powers of two, clamp": (RowwiseScaling(power_of_two=True, nonfinite="clamp"), (1, 0)),
    "1x128": (BlockScaling(), (1, 128)),
    "1x128, float32 scales": (BlockScaling(power_of_two=False, nonfinite="clamp"), (1, 128)),
    "128x128": (BlockScaling(), (128, 128)),
    "MXFP8": (MXFP8(), (1, 32)),
    "MXFP8, floor": (MXFP8(rounding="floor"), (1, 32)),
    "MXFP4": (MXFP4(), (1, 32)),
}


@levels
@pytest.mark.parametrize(("recipe", "grid"), TURNED.values(), ids=TURNED)
def test_matrices_and_transposes_in_blocks(level: str, recipe: Recipe, grid: Block) -> None:
    """In one pass with counters, and transposes in the order of their memory; of Inf, NaN, zeros and tiny
    numbers too."""
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-45, -3e38, -0.0])
    matrices = [
        all_bfloat16().view(256, 256),
        random_float32(130, 333),
        random_float32(1, 1),
        random_float32(300, 3),
    ]
    matrices[1][5:7, ::50], matrices[1][40:80] = odd[:4].repeat(2)[:7], 0.0
    format = recipe.format_of("input")

    def compute() -> list[Tensor]:
        results = []
        for matrix in matrices:
            for x in (matrix, matrix.t(), matrix.t().half() if matrix.dtype == torch.float32 else matrix):
                row, block_row = torch.zeros(7, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
                for dtype in (torch.bfloat16, torch.float32):
                    results.append(round_blocks(x, format, grid, recipe, row, block_row, dtype=dtype))
                    results.append(round_blocks(x, format, grid, recipe, dtype=dtype))
                results += [row, block_row, *quantize_blocks(x, format, grid, recipe)[:2]]
        return [result.contiguous() for result in results]

    assert_same_bits(at(level, compute), at("reference", compute))
