"""Products on a device's FP8 units by torch's `scaled_mm`: the order of scales in memory, and which fail.

A library may lack a product for a device that has the units, or return wrong numbers for a layout that it
does not check. So the first product of each kind on each device is compared with the exact one. One that
fails is given up with a warning, and its operands are multiplied as BF16.

An operand is a matrix [rows, k] of FP8 bytes with its inverse scales, float32: without dimensions; [rows, 1];
or one for each block, [rows, k / 128], [rows / 128, k / 128] or [rows, k / 32]; the last are powers of two.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels import devices
from fp8scope_kernels.devices import Granularity
from fp8scope_kernels.plain_tensors import is_abstract
from fp8scope_kernels.recipes import (
    MXFP8,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Recipe,
    RowwiseScaling,
)
from fp8scope_kernels.torch_internals import scaled_mm

ALIGNMENT = 16
"""FP8 matrix units need inner and output sizes that are multiples of 16."""
SCALED_ROWS, SCALED_COLUMNS = 128, 4
"""The tile of E8M0 scales that a unit reads."""
TOLERANCE = 2.0**-5
"""Of the product of magnitudes: units may accumulate in 14 bits. A wrong scale is off by far more."""

logger = logging.getLogger(__name__)


class ProductKind(NamedTuple):
    """The products that one comparison stands for."""

    device: torch.device
    left: str
    right: str
    left_dtype: torch.dtype
    right_dtype: torch.dtype
    out_dtype: torch.dtype


_reasons: dict[ProductKind, str] = {}
"""The kinds that were tried, with the reason for which one was given up; empty for those that are right."""
_lost: set[tuple[torch.device, Granularity]] = set()
"""The granularities of the kinds that were given up: operands in FP8 would be of no use."""
_logged: set[str] = set()


def granularity_of(recipe: Recipe) -> Granularity | None:
    """The granularity of a recipe's scales, as units name it; None if no unit multiplies its operands."""
    if isinstance(recipe, DelayedScaling | CurrentScaling):
        return "tensor"
    if isinstance(recipe, RowwiseScaling):
        return "row"
    if isinstance(recipe, BlockScaling):
        return "1x128"
    return "1x32" if isinstance(recipe, MXFP8) else None


def has_fp8_units(device: torch.device, granularity: Granularity = "tensor") -> bool:
    """Return whether torch multiplies FP8 operands with such scales on units of the device."""
    if not devices.is_accelerator(device) or granularity not in devices.capabilities_of(device).units:
        return False
    return (device, granularity) not in _lost


def reason_for_size(granularity: Granularity, rows: int, inner: int) -> str:
    """The reason that an operand [rows, inner] of this granularity cannot go to the units; empty if it can.

    Other sizes of the inner dimension are padded where there are no blocks.
    """
    block = {"1x128": 128, "1x32": 32}.get(granularity)
    if block is None:
        return ""
    if inner % block or inner == block:
        return f"{inner} is not a multiple of {block}, or a single block"
    return f"{rows} is not a multiple of {ALIGNMENT}" if rows % ALIGNMENT else ""


def log_once(reason: str) -> None:
    """Say in one line why some operands are multiplied as BF16 although the device has FP8 units."""
    if reason not in _logged:
        _logged.add(reason)
        logger.info("Some products of FP8 layers take BF16 operands, with the same numbers: %s.", reason)


def multiply_on_units(
    left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, out_dtype: torch.dtype
) -> Tensor | None:
    """left [m, k] times the transpose of right [n, k]; None if units do not compute that.

    In bfloat16, or in float32 for a float32 `out_dtype` where a unit can write that.
    """
    arguments = left, left_inverse, right, right_inverse, out_dtype
    kind = _kind_of(*arguments)
    if is_abstract(left):
        return left.new_empty(left.shape[0], right.shape[0], dtype=out_dtype)
    if kind not in _reasons and not devices.is_capturing(left.device):
        _reasons[kind] = _compare(kind)
        if _reasons[kind]:
            _give_up(kind, _reasons[kind])
    if _reasons.get(kind, "captured"):
        return None
    try:
        return _product(*arguments)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _reasons[kind] = str(error)
        _give_up(kind, str(error))
        return None


def was_on_units(
    left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, out_dtype: torch.dtype
) -> bool:
    """Return whether the last product of this kind ran on the units."""
    return _reasons.get(_kind_of(left, left_inverse, right, right_inverse, out_dtype)) == ""


def _kind_of(
    left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, out_dtype: torch.dtype
) -> ProductKind:
    layouts = _layout(left, left_inverse), _layout(right, right_inverse)
    return ProductKind(left.device, *layouts, left.dtype, right.dtype, out_dtype)


def _layout(values: Tensor, inverse: Tensor) -> str:
    """The layout of an operand's scales over its values."""
    if not inverse.dim():
        return "tensor"
    rows, columns = inverse.shape
    if rows == values.shape[0]:
        return "row" if columns == 1 else f"1x{values.shape[1] // columns}"
    return "128x128"


def _give_up(kind: ProductKind, reason: str) -> None:
    of_layout: dict[str, Granularity] = {"tensor": "tensor", "row": "row", "1x32": "1x32"}
    _lost.add((kind.device, of_layout.get(kind.left, "1x128")))
    warnings.warn(
        "FP8 operands are multiplied as BF16 from now on, with the same numbers, because torch's product on "
        f"FP8 units failed ({kind.left} x {kind.right}: {reason.splitlines()[0]}).",
        RuntimeWarning,
        stacklevel=4,
    )


def _product(
    left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, out_dtype: torch.dtype
) -> Tensor:
    layouts = _layout(left, left_inverse), _layout(right, right_inverse)
    wide = out_dtype == torch.float32
    written = torch.float32 if wide else torch.bfloat16
    if layouts == ("tensor", "tensor") or (layouts == ("row", "row") and wide):
        # Units write float32 with one scale only.
        unscaled = torch.ones((), dtype=torch.float32, device=left.device)
        scales = (unscaled, unscaled) if left_inverse.dim() else (left_inverse, right_inverse)
        left, right = _padded(left), _padded(right)
        product: Tensor = scaled_mm(left.contiguous(), right.contiguous().t(), *scales, out_dtype=written)
        return product.mul_(left_inverse).mul_(right_inverse.t()) if left_inverse.dim() else product
    if layouts == ("row", "row"):
        left, right = _padded(left), _padded(right)
        inverses = left_inverse.contiguous(), right_inverse.t().contiguous()
        product = scaled_mm(left.contiguous(), right.contiguous().t(), *inverses, out_dtype=written)
        return product
    return _product_of_blocks(left, left_inverse, right, right_inverse)


def _product_of_blocks(left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor) -> Tensor:
    """The product in bfloat16. Raises RuntimeError where torch has no such function (before version 2.10)."""
    multiply: Callable[..., Tensor] | None = getattr(functional, "scaled_mm", None)
    if multiply is None:
        raise RuntimeError("this version of torch has no torch.nn.functional.scaled_mm")
    types: Any = functional.ScalingType
    swizzles: Any = functional.SwizzleType
    names = {"1x32": types.BlockWise1x32, "1x128": types.BlockWise1x128, "128x128": types.BlockWise128x128}
    layouts = _layout(left, left_inverse), _layout(right, right_inverse)
    pack = {"1x32": swizzled, "1x128": rows_last, "128x128": padded_blocks}
    swizzle = swizzles.SWIZZLE_32_4_4 if layouts[0] == "1x32" else swizzles.NO_SWIZZLE
    return multiply(
        left.contiguous(),
        right.contiguous().t(),
        pack[layouts[0]](left_inverse),
        names[layouts[0]],
        pack[layouts[1]](right_inverse),
        names[layouts[1]],
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=torch.bfloat16,
    )


def rows_last(inverse: Tensor) -> Tensor:
    """Inverse scales [rows, blocks] of blocks of 1x128 as cuBLAS reads them: rows side by side in memory."""
    return inverse.t().contiguous().t()


def padded_blocks(inverse: Tensor) -> Tensor:
    """Inverse scales [block rows, blocks] of blocks of 128x128 as cuBLAS reads them: [blocks, block rows].

    The blocks of a row lie side by side in memory, padded to a multiple of 4. Without the padding cuBLAS
    returns wrong numbers (https://github.com/pytorch/pytorch/pull/166752).
    """
    return functional.pad(inverse, (0, -inverse.shape[1] % SCALED_COLUMNS)).contiguous().t()


def swizzled(inverse: Tensor) -> Tensor:
    """Inverse scales [rows, blocks], powers of two, of blocks of 1x32: E8M0, flat, in the order of the units.

    A tile has the scales of 128 rows and 4 blocks, padded: byte 16 (row % 32) + 4 (row // 32) + block. Tiles
    follow each other along the blocks (cuBLAS, "1D block scaling factors layout").
    """
    rows, blocks = inverse.shape
    padded = functional.pad(inverse, (0, -blocks % SCALED_COLUMNS, 0, -rows % SCALED_ROWS), value=1.0)
    # The exponent's bits are E8M0; 2^-127 is subnormal in float32, with the bits of 0.
    codes = (padded.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    tiles = codes.view(-1, 4, 32, codes.shape[1] // SCALED_COLUMNS, SCALED_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(torch.float8_e8m0fnu)


def _padded(x: Tensor) -> Tensor:
    """The matrix with an inner size that is a multiple of 16."""
    missing = -x.shape[1] % ALIGNMENT
    # torch cannot pad FP8 dtypes. Zero bytes are the value zero in every FP8 format.
    return functional.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) if missing else x


def _compare(kind: ProductKind) -> str:
    """Compute one product of this kind, and say what is wrong with it; empty if it is right."""
    left, right = (
        _example(kind.device, *part)
        for part in ((kind.left, kind.left_dtype, 1), (kind.right, kind.right_dtype, 2))
    )
    try:
        product = _product(*left, *right, kind.out_dtype).double()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error) or type(error).__name__
    a, b = (dequantized(*operand, torch.float64) for operand in (left, right))
    error_bound = a.abs() @ b.abs().t() * TOLERANCE
    # `not <=`, because NaN is wrong too.
    wrong = ~((product - a @ b.t()).abs() <= error_bound)
    return "its numbers are wrong" if bool(wrong.any()) else ""


def _example(device: torch.device, layout: str, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """An operand with scales of its own everywhere, and with blocks, 5 of them, which is no multiple of 4."""
    rows, inner = (32, 64) if layout in ("tensor", "row") else (256, 640)
    # The explicit device keeps torch's default out.
    draw = torch.Generator("cpu").manual_seed(seed)
    values = torch.randint(1, 9, (rows, inner), generator=draw, device="cpu").float().to(device).to(dtype)
    shapes = {"tensor": (), "row": (rows, 1), "128x128": (rows // 128, inner // 128)}
    shape = shapes.get(layout) or (() if layout == "tensor" else (rows, inner // int(layout[2:])))
    exponents = torch.randint(-6, 7, shape, generator=draw, device="cpu").float()
    return values, torch.exp2(exponents).to(device)


def dequantized(values: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """values * inverse scale of each element, rounded once to `dtype`."""
    wide = values.to(torch.float64 if dtype == torch.float64 else torch.float32)
    if inverse.dim():
        rows, inner = values.shape
        height, width = -(-rows // inverse.shape[0]), -(-inner // inverse.shape[1])
        inverse = inverse.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :inner]
    return (wide * inverse).to(dtype)
