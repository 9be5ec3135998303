"""Products of quantised matrices: FP8 units where the hardware has them, else exact BF16 operands.

An operand's values q are multiplied as they are, and the inverse scales are applied to the product. So the
operands are exact in BF16 (which holds every FP8 value) whatever the scale is, power of two or not.
"""

import platform
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels import backends
from fp8scope_kernels.block_quantization import quantize_blocks
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.formats import E4M3, Format
from fp8scope_kernels.quantization import (
    Extent,
    quantize,
    quantize_and_measure,
    quantize_now,
    quantize_values,
)
from fp8scope_kernels.recipes import MXFP8, Block, BlockScaling, Nonfinite, Recipe, RowwiseScaling
from fp8scope_kernels.triton import availability as triton_availability
from fp8scope_kernels.triton import backend as triton_backend

ALIGNMENT = 16
"""FP8 matrix units take inner and output sizes in multiples of 16."""


class Operand(NamedTuple):
    """A quantised matrix [rows, columns], standing for `values * inverse_scale`.

    `values`: FP8 bytes for hardware with FP8 units, else the same numbers as bfloat16. With blocks along the
    dimension summed over, whose scales cannot be left to the product, the dequantised matrix instead:
    bfloat16 where that is exact (scales are powers of two), else float32.
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


def has_fp8_units(device: torch.device) -> bool:
    """Whether `torch._scaled_mm` runs on FP8 units there: NVIDIA GPUs from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def to_operand(
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    *,
    saturate: bool,
    extent: Extent,
    fp8: bool,
    stochastic: bool = False,
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
    """`to_operand`, its transpose, and x's extent, from one pass over x; None if it failed.

    Triton's pass, or that of the compiled backend, which only reads a tensor whose extent is not known. The
    transpose is written out if `transpose` says so and FP8 units, which want it contiguous, are to read it;
    else it is a view. The extent is the one given, or taken if `measure` says so.
    """
    dtype = format.dtype if fp8 and format.dtype is not None else torch.bfloat16
    if not triton_availability.wants(x):
        if measure:
            data, extent = quantize_and_measure(dtype, x, scale, format, row, nonfinite)
        else:
            data = quantize_now(dtype, x, scale, format, row, saturate, extent, nonfinite)
        operand = Operand(data, scale.reciprocal())
        return operand, operand.t(), extent
    passed = triton_availability.attempt(
        lambda: triton_backend.quantize(
            dtype, x, scale, format, row,
            saturate=saturate, extent=extent, measure=measure, transpose=transpose and fp8,
            nonfinite=nonfinite,
        )
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
) -> Operand:
    """Quantise a matrix, the dimension summed over last, in blocks for `multiply`. See `quantize_blocks`."""
    quantized = quantize_blocks(x, format, grid, recipe, row, block_row)
    if isinstance(recipe, RowwiseScaling):
        return Operand(quantized.values, quantized.scale.reciprocal().reshape(-1, 1))
    one = torch.ones((), dtype=torch.float32, device=x.device)
    exact = isinstance(recipe, MXFP8) or (isinstance(recipe, BlockScaling) and recipe.power_of_two)
    return Operand(quantized.dequantize(torch.bfloat16 if exact else torch.float32), one)


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype) -> Tensor:
    """a [m, k] times b [k, n] in `out_dtype`: accumulated in float32, rounded to BF16, scaled, rounded.

    FP8 operands must not both be E5M2, which the units do not multiply; `can_multiply` says so beforehand.
    """
    if a.is_fp8 and b.is_fp8:
        return _scaled_mm(a, b).to(out_dtype)
    # Scaled in float32: before that the product may be beyond float16, and BF16 would round the scale too.
    product = _mm(a.values, b.values)
    if a.inverse_scale.dim() or b.inverse_scale.dim():
        if _is_scaled_natively(product, a, b, out_dtype):
            return cpu_backend.scale_product(product, a.inverse_scale, b.inverse_scale, out_dtype)
        return product.float().mul_(a.inverse_scale).mul_(b.inverse_scale).to(out_dtype)
    inverse = a.inverse_scale * b.inverse_scale
    if product.is_cpu and product.dtype == out_dtype:
        # By a number torch multiplies in float32 and rounds once: the same bits, in one pass, not three.
        return product.mul_(inverse.item())
    return product.float().mul_(inverse).to(out_dtype)


def _is_scaled_natively(product: Tensor, a: Operand, b: Operand, out_dtype: torch.dtype) -> bool:
    by_rows = a.inverse_scale.dim() == b.inverse_scale.dim() == 2
    dtypes = product.dtype == torch.bfloat16 and out_dtype in (torch.bfloat16, torch.float32)
    return by_rows and dtypes and backends.use_compiled(product)


def can_multiply(a: Format, b: Format) -> bool:
    """Whether FP8 units multiply these two formats: at least one has to be E4M3."""
    return E4M3 in (a, b) and a.dtype is not None and b.dtype is not None


@cache
def has_bf16_units() -> bool:
    """Whether this CPU multiplies BF16 by itself: AVX512-BF16 or AMX; not x86: what oneDNN says of it.

    Where it does not, a BF16 product takes torch 1.2 to 1.5 (AVX-512) or 35 to 88 times (AVX2) as long as a
    float32 one.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return supported
    # Not public: a torch without them multiplies in float32, which is always right.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    # Autocast would cast to its own dtype, and float16 cannot hold what E5M2 and its products reach.
    if torch.is_autocast_enabled(a.device.type):
        with torch.autocast(a.device.type, enabled=False):
            return _mm(a, b)
    if a.is_cpu and a.dtype == b.dtype == torch.bfloat16 and not has_bf16_units():
        # Products of BF16 are exact in float32: the same sum, up to its order, and the same rounding of it.
        return torch.mm(a.float(), b.float()).bfloat16()
    return torch.mm(a, b)


def _scaled_mm(a: Operand, b: Operand) -> Tensor:
    """The units want a row-major, b column-major, and an inner size that is a multiple of 16."""
    left, right = a.values, b.values
    missing = -left.shape[1] % ALIGNMENT
    if missing:
        left = _pad_columns(left, missing)
        right = _pad_columns(right.t(), missing).t()
    product: Tensor = torch._scaled_mm(
        left.contiguous(),
        right.t().contiguous().t(),
        a.inverse_scale,
        b.inverse_scale,
        out_dtype=torch.bfloat16,
    )
    return product


def _pad_columns(x: Tensor, missing: int) -> Tensor:
    # Zero bytes are the value zero in every FP8 format, and padding is not implemented for FP8 dtypes.
    return functional.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)
