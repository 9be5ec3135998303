"""Quantisation with one scale per block of a matrix: rows, tiles, and the groups of MX and NVFP4.

The last dimension of a matrix is the one that a product sums over. Except for rows, a block never spans all
of it. A matrix whose sizes are not multiples of the block is padded with zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels import backends, reference
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.formats import E2M1, Format
from fp8scope_kernels.plain_tensors import check_row, is_abstract, is_plain, readable
from fp8scope_kernels.quantization import check_format, measure_now
from fp8scope_kernels.random_stream import Draw, RandomStream
from fp8scope_kernels.recipes import NVFP4, Block, BlockScaling, Microscaling, Recipe, RowwiseScaling
from fp8scope_kernels.reference import Stochastic
from fp8scope_kernels.statistics import BLOCK_STATISTICS, STATISTICS
from fp8scope_kernels.triton import backend as triton_backend


class BlockTensor(NamedTuple):
    """A matrix quantised in blocks. It represents `values / scale` of each element's block.

    `values`: q [rows, columns] as bfloat16 or in the format's dtype. `scale`: float32
    [block rows, 1, block columns, 1]. `grid`: (height, width) of a block. With a `tensor_scale`, float32
    without dimensions, as NVFP4 has it, it represents `values * (scale * tensor_scale)`.
    """

    values: Tensor
    scale: Tensor
    grid: Block
    tensor_scale: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix, computed in float32 and rounded once to `dtype`.

        Exact in bfloat16 where scales are powers of two, down to bfloat16's smallest normal. Raises
        ValueError if there is not one scale for each block of the matrix.
        """
        if self.tensor_scale is not None:
            return self._dequantized(self.scale * self.tensor_scale, dtype, multiply=True)
        return self._dequantized(self.scale, dtype)

    def without_tensor_scale(self) -> Tensor:
        """values * scale of NVFP4 in bfloat16: exact, E2M1 has two significant bits and E4M3 four."""
        return self._dequantized(self.scale, torch.bfloat16, multiply=True)

    def _dequantized(self, scale: Tensor, dtype: torch.dtype, *, multiply: bool = False) -> Tensor:
        values, scale = readable(self.values), readable(scale)
        _check_scales(values, scale, self.grid)
        supported = values.dtype == torch.bfloat16 and dtype in (torch.bfloat16, torch.float32)
        readables = scale.is_cpu and scale.dtype == torch.float32 and is_plain(scale)
        if supported and readables and values.numel() and backends.use_compiled(values):
            return cpu_backend.dequantize_blocks(values, scale, self.grid, dtype, multiply=multiply)
        return reference.dequantize_blocks(values, scale, self.grid, dtype, multiply=multiply)


def quantize_blocks(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    row: Tensor | None = None,
    block_row: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    stochastic: Stochastic = False,
) -> BlockTensor:
    """Quantise the matrix x [rows, columns] (any floating dtype) in blocks, and accumulate statistics.

    `grid`: height and width of a block, 0 for the whole dimension. `row` takes the statistics over all
    elements, with the median of the block scales as `scale`. `block_row` takes those of the blocks; see
    `StatisticsBuffer`. `dtype`: how q is stored, bfloat16 or the format's own; ValueError for any other.
    `stochastic`: round at random, as in `quantize`, in the row-major order of x.

    NVFP4 has no multiplier for a block: statistics take s = 1 / (b * t), and 1 where b is 0. Its E4M3 scale
    may be rounded down, so that the largest elements of a block saturate.

    NaN stays NaN; Inf becomes NaN or M, with its sign, according to `recipe.nonfinite`. Neither counts in a
    block's amax.

    Raises TypeError as `measure` does, and for a row that is not a plain tensor; ValueError unless x is a
    matrix, `grid` has whole numbers of at least 0, `recipe` has blocks, `format` has at most 8 bits, and the
    rows have their lengths and x's device.
    """
    if dtype not in (torch.bfloat16, format.dtype):
        raise ValueError(f"{format.name} is stored as bfloat16 or in its own dtype, not as {dtype}.")
    x, grid = _checked(x, format, grid, recipe)
    check_row(row, x, len(STATISTICS), "row")
    check_row(block_row, x, len(BLOCK_STATISTICS), "block_row")
    if is_abstract(x) or x.numel() == 0:
        # At least one block each way, also of an empty matrix: products read one for each row.
        scale = torch.ones(_shape_of_scales(x, grid), dtype=torch.float32, device=x.device)
        of_tensor = scale.new_ones(()) if isinstance(recipe, NVFP4) else None
        return BlockTensor(x.to(dtype), scale, grid, of_tensor)
    if isinstance(stochastic, RandomStream):
        stochastic = stochastic.draw()
    if stochastic is not False or isinstance(recipe, NVFP4):
        return _quantize_specially(x, format, grid, recipe, row, block_row, dtype, stochastic)
    if backends.use_triton(x, "quantize_blocks") and triton_backend.takes_grid(grid):
        passed = backends.attempt_triton(
            "quantize_blocks",
            lambda: triton_backend.quantize_blocks(x, format, grid, recipe, row, block_row),
        )
        if passed is not None:
            return BlockTensor(passed[0].to(dtype), passed[1], grid)
    if backends.use_compiled(x):
        if dtype == torch.bfloat16 and _is_turned(x, grid, row, block_row):
            turned, by_run = cpu_backend.quantize_columns(x.t(), format, grid[1], recipe, dtype, divide=False)
            return BlockTensor(turned.t(), by_run.t()[:, None, :, None], grid)
        return BlockTensor(*cpu_backend.quantize_blocks(x, format, grid, recipe, dtype, row, block_row), grid)
    blocks = reference.quantize_blocks(x, format, grid, recipe, row, block_row, dtype)
    return BlockTensor(blocks.values, blocks.scale, grid)


def round_blocks(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    row: Tensor | None = None,
    block_row: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """`quantize_blocks(...).dequantize(dtype)`, rounded to nearest, in one pass of the compiled kernels.

    `dtype`: bfloat16 or float32. With blocks of one row, the transpose of a contiguous matrix comes back as
    one, and is read in the order of its memory.
    """
    taken = not is_abstract(x) and x.numel() and not isinstance(recipe, NVFP4) and backends.use_compiled(x)
    if not taken or backends.use_triton(x, "quantize_blocks"):
        return quantize_blocks(x, format, grid, recipe, row, block_row).dequantize(dtype)
    x, grid = _checked(x, format, grid, recipe)
    check_row(row, x, len(STATISTICS), "row")
    check_row(block_row, x, len(BLOCK_STATISTICS), "block_row")
    if _is_turned(x, grid, row, block_row):
        return cpu_backend.quantize_columns(x.t(), format, grid[1], recipe, dtype, divide=True)[0].t()
    return cpu_backend.round_blocks(x, format, grid, recipe, dtype, row, block_row)


def _is_turned(x: Tensor, grid: Block, row: Tensor | None, block_row: Tensor | None) -> bool:
    """Return whether x is a transpose whose blocks are runs of its columns in memory, not to be counted."""
    return grid[0] == 1 and row is None and block_row is None and x.t().is_contiguous()


def _quantize_specially(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    row: Tensor | None,
    block_row: Tensor | None,
    dtype: torch.dtype,
    stochastic: Stochastic,
) -> BlockTensor:
    """NVFP4, and blocks that are rounded at random: on a CPU compiled, elsewhere by the definition."""
    draw = stochastic if isinstance(stochastic, Draw) else None
    # Words are drawn along rows; a generator of torch draws in eager torch only.
    in_rows = draw is not None and grid[0] == 1
    if backends.use_compiled(x) and (in_rows or stochastic is False):
        if not isinstance(recipe, NVFP4):
            values, scale = cpu_backend.quantize_blocks(x, format, grid, recipe, dtype, row, block_row, draw)
            return BlockTensor(values, scale, grid)
        of_tensor = reference.amax_to_nvfp4_tensor_scale(measure_now(x).amax)
        values, scale = cpu_backend.quantize_nvfp4(
            x, format, grid, recipe.nonfinite, of_tensor.item(), row, block_row, draw
        )
        return BlockTensor(values, scale, grid, of_tensor)
    blocks = reference.quantize_blocks(x, format, grid, recipe, row, block_row, dtype, stochastic)
    return BlockTensor(blocks.values, blocks.scale, grid, blocks.tensor_scale)


def _checked(x: Tensor, format: Format, grid: Block, recipe: Recipe) -> tuple[Tensor, Block]:
    """The matrix as the kernels read it, and the grid without zeros. Raises as `quantize_blocks` says."""
    if not x.is_floating_point():
        raise TypeError(f"Only floating-point tensors can be quantised, got {x.dtype}.")
    x = readable(x)
    # torch computes little with FP8 numbers.
    x = x.float() if x.dtype.itemsize == 1 else x
    if x.dim() != 2:
        raise ValueError(f"Blocks are those of a matrix, got a tensor of shape {tuple(x.shape)}.")
    height, width = grid
    if min(grid) < 0 or any(size != int(size) for size in grid):
        raise ValueError(f"grid must be two whole numbers of at least 0, got {grid!r}.")
    if not isinstance(recipe, Microscaling | BlockScaling | RowwiseScaling | NVFP4):
        raise ValueError(f"{type(recipe).__name__} has no scale for each block.")
    check_format(format)
    if isinstance(recipe, NVFP4) and format != E2M1:
        raise ValueError(f"NVFP4 is a recipe for E2M1, not for {format.name}.")
    return x, (height or max(x.shape[0], 1), width or max(x.shape[1], 1))


def _check_scales(values: Tensor, scale: Tensor, grid: Block) -> None:
    if values.dim() != 2 or min(grid) < 1:
        raise ValueError(f"A tensor of shape {tuple(values.shape)} has no blocks of {grid!r}.")
    expected = _shape_of_scales(values, grid)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"A matrix of shape {tuple(values.shape)} in blocks of {grid!r} needs scales of shape "
            f"{expected}, got {tuple(scale.shape)}."
        )


def _shape_of_scales(x: Tensor, grid: Block) -> tuple[int, int, int, int]:
    down, across = (max(1, -(-size // block)) for size, block in zip(x.shape, grid, strict=True))
    return down, 1, across, 1
