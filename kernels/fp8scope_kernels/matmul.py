"""Products of quantised matrices: on FP8 units where the hardware has them, else of exact BF16 operands.

The product multiplies the quantised values q, and applies the inverse scales to the result. The operands are
therefore exact in BF16, which holds every FP8 value, whether or not the scale is a power of two.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels import backends, devices
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
from fp8scope_kernels.torch_internals import has_bf16_units, scaled_mm
from fp8scope_kernels.triton import backend as triton_backend

ALIGNMENT = 16
"""FP8 matrix units need inner and output sizes that are multiples of 16."""


class Operand(NamedTuple):
    """A quantised matrix [rows, columns]. It represents `values * inverse_scale`.

    `values`: FP8 bytes for hardware with FP8 units, else the same numbers as bfloat16. With blocks along the
    dimension summed over, scales cannot be applied to the product; `values` is then the dequantised matrix,
    in bfloat16 where that is exact (scales are powers of two), else in float32. In NVFP4 it is without the
    scale of the tensor, which is exact in bfloat16.
    `inverse_scale`: float32, no dimensions; or [rows, 1], or [1, columns] in a transposed operand.
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


def has_fp8_units(device: torch.device) -> bool:
    """Return whether torch multiplies FP8 operands on units of the device, and has not failed to."""
    return devices.is_accelerator(device) and devices.capabilities_of(device).units and not _unit_failure


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
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    *,
    saturate: bool,
    extent: Extent | None,
    fp8: bool,
    measure: bool,
    transpose: bool,
    nonfinite: Nonfinite = "propagate",
) -> tuple[Operand, Operand, Extent | None] | None:
    """`to_operand`, its transpose, and x's extent, from one pass over x; None if Triton failed.

    For tensors of the Triton or the compiled backend. The transpose is a view, except that with `transpose`
    and `fp8` Triton writes it out, because FP8 units need it contiguous. The extent is the given one, or
    measured in the same pass with `measure`.
    """
    dtype = format.dtype if fp8 and format.dtype is not None else torch.bfloat16
    if not backends.use_triton(x, "quantize"):
        if measure:
            data, extent = quantize_and_measure(dtype, x, scale, format, row, nonfinite)
        else:
            data = quantize_now(dtype, x, scale, format, row, saturate, extent, nonfinite)
        operand = Operand(data, scale.reciprocal())
        return operand, operand.t(), extent
    passed = backends.attempt_triton(
        "quantize",
        lambda: triton_backend.quantize(
            dtype, x, scale, format, row,
            saturate=saturate, extent=extent, measure=measure, transpose=transpose and fp8,
            nonfinite=nonfinite,
        ),
    )  # fmt: skip
    if passed is None:
        return None
    operand = Operand(passed.data, scale.reciprocal())
    turned = operand.t() if passed.transposed is None else Operand(passed.transposed, operand.inverse_scale)
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
) -> Operand:
    """Quantise a matrix, whose last dimension is summed over, in blocks. See `quantize_blocks`.

    `rotated`: after a random Hadamard transform along that dimension, which becomes a multiple of 16.
    """
    if rotated:
        x = rotate(x)
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


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """a [m, k] times b [k, n] in `out_dtype`: accumulated in float32, rounded to BF16, scaled, rounded.

    FP8 operands must not both be E5M2, which FP8 units do not multiply; see `can_multiply`.
    """
    if a.is_fp8 and b.is_fp8:
        product = _multiply_on_units(a, b)
        if product is not None:
            return product.to(out_dtype)
        a, b = (Operand(operand.values.bfloat16(), operand.inverse_scale) for operand in (a, b))
    # Scaled in float32: the unscaled product may be beyond float16, and BF16 would round the scale.
    product = _mm(a.values, b.values)
    if a.inverse_scale.dim() or b.inverse_scale.dim():
        if _can_scale_compiled(product, a, b, out_dtype):
            return cpu_backend.scale_product(product, a.inverse_scale, b.inverse_scale, out_dtype)
        return product.float().mul_(a.inverse_scale).mul_(b.inverse_scale).to(out_dtype)
    inverse = a.inverse_scale * b.inverse_scale
    if can_branch_on(product) and product.dtype == out_dtype:
        # torch multiplies by a number in float32 and rounds once: the same bits in one pass instead of three.
        return product.mul_(inverse.item())
    return product.float().mul_(inverse).to(out_dtype)


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


_unit_failure = ""
"""The reason for which products on FP8 units were given up in this process."""


def _multiply_on_units(a: Operand, b: Operand) -> Tensor | None:
    """The product in bfloat16; None once torch's product of FP8 operands has failed on this machine.

    A library may lack this product for a device that has the units: training must go on.
    """
    global _unit_failure
    if _unit_failure:
        return None
    try:
        return _scaled_mm(a, b)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _unit_failure = str(error)
        warnings.warn(
            "FP8 operands are multiplied as BF16 from now on, with the same numbers, because torch's product "
            f"on FP8 units failed ({_unit_failure.splitlines()[0]}).",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _scaled_mm(a: Operand, b: Operand) -> Tensor:
    """FP8 units need a row-major, b column-major, and an inner size that is a multiple of 16."""
    left, right = a.values, b.values
    missing = -left.shape[1] % ALIGNMENT
    if missing:
        left = _pad_columns(left, missing)
        right = _pad_columns(right.t(), missing).t()
    product: Tensor = scaled_mm(
        left.contiguous(),
        right.t().contiguous().t(),
        a.inverse_scale,
        b.inverse_scale,
        out_dtype=torch.bfloat16,
    )
    return product


def _pad_columns(x: Tensor, missing: int) -> Tensor:
    # torch cannot pad FP8 dtypes. Zero bytes are the value zero in every FP8 format.
    return functional.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)
