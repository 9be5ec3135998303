"""Quantisation with one scale per block of a matrix: rows, 1x128 and 128x128 tiles, and MX groups of 32.

The last dimension of a matrix is the one that a product sums over. Except for rows, a block never spans all
of it. A matrix whose sizes are not multiples of the block is padded with zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels import backends, reference
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.formats import Format
from fp8scope_kernels.recipes import Block, Recipe
from fp8scope_kernels.triton import backend as triton_backend


class BlockTensor(NamedTuple):
    """A matrix quantised in blocks. It represents `values / scale` of each element's block.

    `values`: q [rows, columns] as bfloat16 or in the format's dtype. `scale`: float32
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
        supported = values.dtype == torch.bfloat16 and dtype in (torch.bfloat16, torch.float32)
        if supported and values.numel() and backends.use_compiled(values):
            return cpu_backend.dequantize_blocks(values, self.scale, self.grid, dtype)
        return reference.dequantize_blocks(values, self.scale, self.grid, dtype)


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
    elements, with the median of the block scales as `scale`. `block_row` takes those of the blocks; see
    `StatisticsBuffer`. `dtype`: how q is stored, bfloat16 or the format's own; ValueError for any other.

    NaN stays NaN; Inf becomes NaN or M, with its sign, according to `recipe.nonfinite`. Neither counts in a
    block's amax.
    """
    if dtype not in (torch.bfloat16, format.dtype):
        raise ValueError(f"{format.name} is stored as bfloat16 or in its own dtype, not as {dtype}.")
    grid = (grid[0] or max(x.shape[0], 1), grid[1] or max(x.shape[1], 1))
    if x.numel() == 0:
        return BlockTensor(x.detach().to(dtype), _scales_of_nothing(x, grid), grid)
    if backends.use_triton(x) and triton_backend.takes_grid(grid):
        passed = backends.attempt_triton(
            lambda: triton_backend.quantize_blocks(x, format, grid, recipe, row, block_row)
        )
        if passed is not None:
            return BlockTensor(passed[0].to(dtype), passed[1], grid)
    if backends.use_compiled(x):
        return BlockTensor(*cpu_backend.quantize_blocks(x, format, grid, recipe, dtype, row, block_row), grid)
    return BlockTensor(*reference.quantize_blocks(x, format, grid, recipe, row, block_row, dtype), grid)


def _scales_of_nothing(x: Tensor, grid: Block) -> Tensor:
    """The scales of an empty matrix: ones, at least one block each way. Products read one for each row."""
    down, across = (max(1, -(-size // block)) for size, block in zip(x.shape, grid, strict=True))
    return torch.ones(down, 1, across, 1, dtype=torch.float32, device=x.device)
