"""Products of quantised matrices: on FP8 units where the hardware has them, else of exact BF16 operands.

The product multiplies the quantised values q, and applies the inverse scales to the result. The operands are
therefore exact in BF16, which holds every FP8 value, whether or not the scale is a power of two.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels import backends
from fp8scope_kernels.block_quantization import quantize_blocks, round_blocks
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.formats import E4M3, E4M3FNUZ, Format
from fp8scope_kernels.hadamard import rotate
from fp8scope_kernels.plain_tensors import can_branch_on
from fp8scope_kernels.quantization import (
    quantize,
    quantize_and_measure,
    quantize_now,
    quantize_values,
)
from fp8scope_kernels.recipes import Block, BlockScaling, Microscaling, Nonfinite, Recipe, RowwiseScaling
from fp8scope_kernels.reference import Extent, Stochastic
from fp8scope_kernels.torch_internals import has_bf16_units
from fp8scope_kernels.triton import backend as triton_backend
from fp8scope_kernels.triton.backend import AmaxHistory, ChosenScale
from fp8scope_kernels.unit_products import dequantized, multiply_on_units, was_on_units


class Operand(NamedTuple):
    """A quantised matrix [rows, columns]. It represents `values * inverse_scale`.

    `values`: FP8 bytes for hardware with FP8 units, else the same numbers as bfloat16. With blocks along the
    dimension summed over, scales cannot be applied to the product; without FP8 units `values` is then the
    dequantised matrix, in bfloat16 where that is exact (scales are powers of two), else in float32. In NVFP4
    it is without the scale of the tensor, which is exact in bfloat16.
    `inverse_scale`: float32, no dimensions; or [rows, 1], or [1, columns] in a transposed operand; or, of
    FP8 bytes in blocks, one for each block, [block rows, block columns].
    """

    values: Tensor
    inverse_scale: Tensor

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype.itemsize == 1

    def t(self) -> "Operand":
        """The transpose, a view."""
        inverse = self.inverse_scale
        return Operand(self.values.t(), inverse.t() if inverse.dim() else inverse)


def exact_operand(x: Tensor) -> Operand:
    """The matrix x, of any float dtype, as a BF16 operand with inverse scale 1: rounded, not quantised."""
    return Operand(x.bfloat16(), torch.ones((), device=x.device))


def to_operand(
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    *,
    saturate: bool,
    extent: Extent,
    fp8: bool,
    stochastic: Stochastic = False,
    nonfinite: Nonfinite = "propagate",
) -> Operand:
    """Quantise a matrix for `multiply`: as FP8 bytes, or as bfloat16 values. See `quantize`."""
    if fp8:
        data, inverse, _ = quantize(
            x, scale, format, row,
            saturate=saturate, extent=extent, stochastic=stochastic, nonfinite=nonfinite,
        )  # fmt: skip
        return Operand(data, inverse)
    values = quantize_values(
        x, scale, format, row, saturate=saturate, extent=extent, stochastic=stochastic, nonfinite=nonfinite
    )
    return Operand(values, scale.reciprocal())


def to_operands_in_one_pass(
    x: Tensor,
    scale: ChosenScale,
    format: Format,
    row: Tensor | None,
    *,
    saturate: bool,
    extent: Extent | None,
    fp8: bool,
    measure: bool,
    transpose: bool,
    nonfinite: Nonfinite = "propagate",
    history: AmaxHistory | None = None,
) -> tuple[Operand, Operand, Extent | None] | None:
    """`to_operand`, its transpose, and x's extent, from one pass over x; None if Triton failed.

    For tensors of the Triton or the compiled backend. The transpose is a view, except that with `transpose`
    and `fp8` Triton writes it out, because FP8 units need it contiguous. The extent is the given one, or
    measured in the same pass with `measure`. With `history`, Triton adds the amax to it.
    """
    dtype = format.dtype if fp8 and format.dtype is not None else torch.bfloat16
    chosen, inverse = scale
    if not backends.use_triton(x, "quantize"):
        if measure:
            data, extent = quantize_and_measure(dtype, x, chosen, format, row, nonfinite)
        else:
            data = quantize_now(dtype, x, chosen, format, row, saturate, extent, nonfinite)
        operand = Operand(data, inverse)
        return operand, operand.t(), extent
    passed = backends.attempt_triton(
        "quantize",
        lambda: triton_backend.quantize(
            dtype, x, chosen, format, row,
            saturate=saturate, extent=extent, measure=measure, transpose=transpose and fp8,
            nonfinite=nonfinite, history=history,
        ),
    )  # fmt: skip
    if passed is None:
        return None
    operand = Operand(passed.data, inverse)
    turned = operand.t() if passed.transposed is None else Operand(passed.transposed, inverse)
    if passed.amax is not None and passed.nonfinite is not None:
        extent = Extent(passed.amax, passed.nonfinite)
    return operand, turned, extent


def to_block_operand(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    row: Tensor | None = None,
    block_row: Tensor | None = None,
    *,
    stochastic: Stochastic = False,
    rotated: bool = False,
    fp8: bool = False,
) -> Operand:
    """Quantise a matrix, whose last dimension is summed over, in blocks. See `quantize_blocks`.

    `rotated`: after a random Hadamard transform along that dimension, which becomes a multiple of 16. `fp8`:
    as FP8 bytes.
    """
    if rotated:
        x = rotate(x)
    if fp8 and format.dtype is not None:
        passed = quantize_blocks(
            x, format, grid, recipe, row, block_row, dtype=format.dtype, stochastic=stochastic
        )
        return Operand(passed.values, passed.scale.reciprocal()[:, 0, :, 0])
    unit_scale = torch.ones((), dtype=torch.float32, device=x.device)
    exact = isinstance(recipe, Microscaling) or (isinstance(recipe, BlockScaling) and recipe.power_of_two)
    dtype = torch.bfloat16 if exact else torch.float32
    if stochastic is False and isinstance(recipe, Microscaling | BlockScaling):
        return Operand(round_blocks(x, format, grid, recipe, row, block_row, dtype=dtype), unit_scale)
    quantized = quantize_blocks(x, format, grid, recipe, row, block_row, stochastic=stochastic)
    if quantized.tensor_scale is not None:
        return Operand(quantized.without_tensor_scale(), quantized.tensor_scale)
    if isinstance(recipe, RowwiseScaling):
        return Operand(quantized.values, quantized.scale.reciprocal().reshape(-1, 1))
    return Operand(quantized.dequantize(dtype), unit_scale)


def without_bytes(operand: Operand) -> Operand:
    """The operand as it is where there are no FP8 units: in bfloat16; in float32 for scales of blocks."""
    values, inverse = operand
    if not operand.is_fp8:
        return operand
    rows, columns = values.shape
    if not inverse.dim() or inverse.shape in ((rows, 1), (1, columns)):
        return Operand(values.bfloat16(), inverse)
    return Operand(dequantized(values, inverse, torch.float32), torch.ones_like(inverse[0, 0]))


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """a [m, k] times b [k, n] in `out_dtype`: accumulated in float32, rounded to BF16, scaled, rounded.

    On FP8 units the scales are applied to the sum in float32, and what is rounded first is the result. FP8
    operands must not both be E5M2, which FP8 units do not multiply; see `can_multiply`.
    """
    if a.is_fp8 and b.is_fp8:
        product = multiply_on_units(*a, *b.t(), out_dtype)
        if product is not None:
            return product.to(out_dtype)
    a, b = without_bytes(a), without_bytes(b)
    if a.values.dtype != b.values.dtype:
        # One was never in bytes: in bfloat16, if scales are powers of two. The other is then exact in it too.
        a, b = (Operand(values.bfloat16(), inverse) for values, inverse in (a, b))
    # Scaled in float32: the unscaled product may be beyond float16, and BF16 would round the scale.
    product = _mm(a.values, b.values)
    if a.inverse_scale.dim() or b.inverse_scale.dim():
        if _can_scale_compiled(product, a, b, out_dtype):
            return cpu_backend.scale_product(product, a.inverse_scale, b.inverse_scale, out_dtype)
        return product.float().mul_(a.inverse_scale).mul_(b.inverse_scale).to(out_dtype)
    inverse = a.inverse_scale * b.inverse_scale
    if can_branch_on(product) and product.dtype == out_dtype:
        # torch multiplies by a number in float32 and rounds once: the same bits in one pass instead of three.
        # Operands in blocks have a scale of 1.
        factor = inverse.item()
        return product if factor == 1.0 else product.mul_(factor)
    return product.float().mul_(inverse).to(out_dtype)


def ran_on_units(a: Operand, b: Operand, out_dtype: torch.dtype) -> bool:
    """Return whether `multiply` has computed this product on FP8 units."""
    return a.is_fp8 and b.is_fp8 and was_on_units(*a, *b.t(), out_dtype)


def _can_scale_compiled(product: Tensor, a: Operand, b: Operand, out_dtype: torch.dtype) -> bool:
    by_rows = a.inverse_scale.dim() == b.inverse_scale.dim() == 2
    dtypes = product.dtype == torch.bfloat16 and out_dtype in (torch.bfloat16, torch.float32)
    return by_rows and dtypes and backends.use_compiled(product)


def can_multiply(a: Format, b: Format) -> bool:
    """Return whether FP8 units multiply these two formats: at least one has three bits of mantissa."""
    return bool({E4M3, E4M3FNUZ} & {a, b}) and a.dtype is not None and b.dtype is not None


def _mm(a: Tensor, b: Tensor) -> Tensor:
    # Autocast would cast to its own dtype, and float16 cannot hold the range of E5M2 and its products.
    if not a.is_meta and torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return _mm(a, b)
    if a.is_cpu and a.dtype == b.dtype == torch.bfloat16 and not has_bf16_units():
        # Products of BF16 are exact in float32: the same sum, up to its order, with the same rounding.
        return torch.mm(a.float(), b.float()).bfloat16()
    return torch.mm(a, b)
