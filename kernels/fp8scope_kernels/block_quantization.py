"""Quantisation with one scale per block of a matrix: rows, 1x128 and 128x128 tiles, and MX groups of 32.

Matrices come with the dimension that a product sums over last; blocks never share a scale across it unless
they are rows. A matrix whose sizes are not multiples of the block is treated as if padded with zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels import backends
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.formats import E8M0, Format
from fp8scope_kernels.quantization import MIN_SCALE, amax_to_scale
from fp8scope_kernels.recipes import MXFP8, Block, BlockScaling, Recipe, RowwiseScaling
from fp8scope_kernels.reference import EXPONENT_BITS, infinite_to_nan_, round_to_format
from fp8scope_kernels.triton import availability as triton_availability
from fp8scope_kernels.triton import backend as triton_backend


class BlockTensor(NamedTuple):
    """A matrix quantised in blocks, standing for `values / scale` of each element's block.

    `values`: q [rows, columns] as bfloat16, or in the format's dtype if so wanted. `scale`: float32
    [block rows, 1, block columns, 1]. `grid`: (height, width) of a block.
    """

    values: Tensor
    scale: Tensor
    grid: Block

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, computed in float32 and rounded once to `dtype`.

        Exact in bfloat16 where scales are powers of two, down to bfloat16's smallest normal.
        """
        values = self.values
        known = values.dtype == torch.bfloat16 and dtype in (torch.bfloat16, torch.float32)
        if known and values.numel() and backends.use_compiled(values):
            return cpu_backend.dequantize_blocks(values, self.scale, self.grid, dtype)
        tiles = _tiles(values.float(), self.grid) / self.scale
        return _matrix(tiles, values.shape).to(dtype)


def amax_to_mx_scale(amax: Tensor, format: Format, rounding: str) -> Tensor:
    """The multiplier s = 1/X for shared MX scales X, which E8M0 can hold: float32, shape of `amax`.

    `floor`: X = 2^(floor(log2 amax) - floor(log2 M)), as in OCP Microscaling Formats 1.0, section 6.3; amax
    may then saturate. `up`: the smallest power of two X with amax / X <= M. X is 1 where amax is 0.
    """
    if rounding == "floor":
        # The exponent of amax, as the power of two itself: its float32 without the mantissa bits.
        power = (amax.clamp(min=MIN_SCALE).view(torch.int32) & EXPONENT_BITS).view(torch.float32)
        scale = torch.full_like(power, 2.0**format.max_exponent).div_(power).clamp_(max=E8M0.max)
        return torch.where(amax > 0, scale, 1.0)
    return amax_to_scale(amax, format, power_of_two=True)


def amax_to_block_scale(amax: Tensor, format: Format, recipe: Recipe) -> Tensor:
    """The multiplier of each block under `recipe`: float32, shape of `amax`."""
    if isinstance(recipe, MXFP8):
        return amax_to_mx_scale(amax, format, recipe.rounding)
    assert isinstance(recipe, RowwiseScaling | BlockScaling)
    return amax_to_scale(amax, format, power_of_two=recipe.power_of_two)


def quantize_blocks(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    row: Tensor | None = None,
    block_row: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> BlockTensor:
    """Quantise the matrix x [rows, columns] (any floating dtype) in blocks, and accumulate statistics.

    `grid`: height and width of a block, 0 for the whole dimension. `row` takes the statistics over all
    elements, with the median of the block scales as `scale`; `block_row` takes those of the blocks, see
    `StatisticsBuffer`. NaN stays NaN; Inf becomes what `recipe.nonfinite` says, NaN or M, with its sign;
    neither counts in a block's amax.
    `dtype`: how q is stored, bfloat16 or the format's own; ValueError for any other.
    """
    if dtype not in (torch.bfloat16, format.dtype):
        raise ValueError(f"{format.name} is stored as bfloat16 or in its own dtype, not as {dtype}.")
    grid = (grid[0] or max(x.shape[0], 1), grid[1] or max(x.shape[1], 1))
    if triton_availability.wants(x) and triton_backend.takes_grid(x, grid):
        passed = triton_availability.attempt(
            lambda: triton_backend.quantize_blocks(x, format, grid, recipe, row, block_row)
        )
        if passed is not None:
            return BlockTensor(passed[0].to(dtype), passed[1], grid)
    if x.numel() and backends.use_compiled(x):
        return BlockTensor(*cpu_backend.quantize_blocks(x, format, grid, recipe, dtype, row, block_row), grid)
    tiles = _tiles(x.detach().float(), grid)
    if x.numel() == 0:
        return BlockTensor(x.detach().to(dtype), tiles.new_ones(1, 1, 1, 1), grid)
    amax = tiles.nan_to_num(0.0, 0.0, 0.0).abs().amax((1, 3), keepdim=True)
    scale = amax_to_block_scale(amax, format, recipe)
    scaled = tiles * scale
    if row is not None or block_row is not None:
        _accumulate(row, block_row, x, tiles, scaled, scale, amax, format)
    scaled.clamp_(-format.max, format.max)
    if recipe.nonfinite == "propagate" and not (x.is_cpu and bool(torch.isfinite(x).all())):
        infinite_to_nan_(scaled, tiles)
    values = scaled if dtype == format.dtype else round_to_format(scaled, format)
    return BlockTensor(_matrix(values, x.shape).to(dtype), scale, grid)


def _accumulate(
    row: Tensor | None,
    block_row: Tensor | None,
    x: Tensor,
    tiles: Tensor,
    scaled: Tensor,
    scale: Tensor,
    amax: Tensor,
    format: Format,
) -> None:
    # Masks are float32, because torch's CPU compares into and sums those several times faster than booleans.
    # Padding counts neither as flushed (it is zero in x too) nor as anything else.
    mask = torch.empty_like(tiles)
    finite = torch.lt(torch.abs(tiles, out=mask), torch.inf, out=torch.empty_like(tiles))
    magnitude = scaled.abs()
    saturated = torch.gt(magnitude, format.limit, out=mask).mul_(finite)
    if block_row is not None:
        block_row[0] += scale.numel()
        block_row[1] += saturated.amax((1, 3)).sum()
        block_row[2:] = torch.stack((scale.min(), scale.median(), scale.max()))
    if row is None:
        return
    half = format.smallest_subnormal / 2
    row[0] += x.numel()
    row[1] = torch.maximum(row[1], amax.max())
    row[2] = scale.median()
    row[3] += _total(saturated)
    row[6] += tiles.numel() - _total(finite)
    flushed = _total(torch.le(magnitude, half, out=mask))
    below = _total(torch.lt(magnitude, format.smallest_normal - half, out=mask))
    row[4] += flushed - _total(torch.eq(tiles, 0, out=mask))
    row[5] += below - flushed


def _total(mask: Tensor) -> Tensor:
    """The number of ones. Within a block float32 is exact, across them float64 has to be."""
    return mask.sum((1, 3)).double().sum()


def _tiles(x: Tensor, grid: Block) -> Tensor:
    """[rows, columns] as [block rows, height, block columns, width], zeros where the matrix ends early."""
    height, width = grid
    padded = functional.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % height))
    return padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)


def _matrix(tiles: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_tiles`."""
    blocks_down, height, blocks_across, width = tiles.shape
    return tiles.reshape(blocks_down * height, blocks_across * width)[: shape[0], : shape[1]]
