"""Products of the quantised matrices of many experts at once, by torch's grouped product.

The numbers are those of `multiply` for each expert, up to the order of summation. Operands are exact in BF16;
those of FP8 units are multiplied there where both are E4M3, which is what torch's grouped product takes.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels import devices
from fp8scope_kernels.matmul import Operand, without_bytes
from fp8scope_kernels.torch_internals import scaled_grouped_mm
from fp8scope_kernels.unit_products import TOLERANCE

ALIGNED_BYTES = 16
"""Rows of the matrices begin at multiples of this."""
E4M3_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)

grouped_mm: Callable[..., Tensor] | None = getattr(
    functional, "grouped_mm", getattr(torch, "_grouped_mm", None)
)
"""torch before 2.8 has none."""

_failure = ""
"""The reason for which grouped products were given up in this process."""
_unit_failure = ""
"""The same for those on FP8 units."""
_compared: set[torch.device] = set()
"""The devices on whose FP8 units a product was right."""


def takes_groups(device: torch.device) -> bool:
    """Return whether torch multiplies groups at once on this device, and has not failed to.

    Not on a CPU: there it multiplies one after the other, too, and `multiply` has the bits of `Fp8Linear`.
    """
    return devices.is_accelerator(device) and grouped_mm is not None and not _failure


def multiply_tokens(
    left: Sequence[Operand], right: Sequence[Operand], out_dtype: torch.dtype
) -> Tensor | None:
    """left [tokens of an expert, k] times right [k, n], for each: [tokens, n] in `out_dtype`.

    None where torch cannot multiply them at once.
    """
    sizes = [operand.values.shape[0] for operand in left]
    if all(operand.is_fp8 for operand in (*left, *right)):
        product = _on_units(left, right, sizes)
        if product is not None:
            return product.to(out_dtype)
    values = _in_bf16(left), _in_bf16(right)
    if values[0] is None or values[1] is None:
        return None
    product = _attempt(torch.cat(values[0]), _stacked(values[1]), sizes)
    if product is None:
        return None
    # As `multiply`: two numbers are multiplied first, rows and columns one after the other.
    by_rows, by_columns = [], []
    for size, a, b in zip(sizes, left, right, strict=True):
        whole = a.inverse_scale.dim() == b.inverse_scale.dim() == 0
        by_rows.append((a.inverse_scale * b.inverse_scale if whole else a.inverse_scale).expand(size, 1))
        if not whole:
            by_columns.append(b.inverse_scale.expand(size, product.shape[1]))
    result = product.float().mul_(torch.cat(by_rows))
    return (result.mul_(torch.cat(by_columns)) if by_columns else result).to(out_dtype)


def multiply_over_tokens(
    left: Sequence[Operand], right: Sequence[Operand], out_dtype: torch.dtype
) -> Tensor | None:
    """left [m, tokens of an expert] times right [tokens, n], for each: [experts, m, n] in `out_dtype`.

    None where torch cannot multiply them at once.
    """
    sizes = [operand.values.shape[0] for operand in right]
    values = _in_bf16([operand.t() for operand in left]), _in_bf16(right)
    if values[0] is None or values[1] is None:
        return None
    # Tokens lie in rows, so that every expert begins at an aligned address.
    product = _attempt(torch.cat(values[0]).t(), torch.cat(values[1]), sizes)
    if product is None:
        return None
    result = product.float()
    for matrix, a, b in zip(result, left, right, strict=True):
        if a.inverse_scale.dim() == b.inverse_scale.dim() == 0:
            matrix.mul_(a.inverse_scale * b.inverse_scale)
        else:
            matrix.mul_(a.inverse_scale).mul_(b.inverse_scale)
    return result.to(out_dtype)


def _in_bf16(operands: Sequence[Operand]) -> list[Tensor] | None:
    """The values as BF16, which is exact for FP8 bytes; None where blocks need float32."""
    values = [without_bytes(operand).values for operand in operands]
    return None if any(value.dtype == torch.float32 for value in values) else values


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """The matrices [experts, k, n], with the order of memory that they have."""
    if all(matrix.stride(0) == 1 for matrix in matrices):
        return torch.stack([matrix.t() for matrix in matrices]).mT
    return torch.stack(list(matrices))


def _ends(sizes: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device="cpu")
    return devices.to_device(ends, device)


def _attempt(a: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """torch's grouped product; None for sizes that it does not take, and once it has failed."""
    global _failure
    aligned = all(max(matrix.stride()[-2:]) * matrix.element_size() % ALIGNED_BYTES == 0 for matrix in (a, b))
    if _failure or grouped_mm is None or not aligned:
        return None
    try:
        with torch.autocast(a.device.type, enabled=False):
            return grouped_mm(a, b, offs=_ends(sizes, a.device))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _failure = str(error)
        _warn("Experts are multiplied one after the other from now on", _failure)
        return None


def _on_units(left: Sequence[Operand], right: Sequence[Operand], sizes: Sequence[int]) -> Tensor | None:
    """The product on FP8 units in bfloat16, scaled; None where they do not take it, or have failed to.

    The first product on a device is compared, as those of `unit_products` are.
    """
    global _unit_failure
    is_e4m3 = all(operand.values.dtype in E4M3_DTYPES for operand in (*left, *right))
    by_lines = all(_has_scales_of_lines(operand) for operand in (*left, *right))
    if _unit_failure or scaled_grouped_mm is None or not (is_e4m3 and by_lines):
        return None
    arguments = _arguments_of_units(left, right, sizes)
    try:
        product: Tensor = scaled_grouped_mm(*arguments, out_dtype=torch.bfloat16)
        if product.device not in _compared and not _are_right(product, left, right, sizes):
            raise RuntimeError("its numbers are wrong")
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _unit_failure = str(error)
        what = "FP8 operands of experts are multiplied as BF16 from now on, with the same numbers"
        _warn(what, _unit_failure)
        return None
    _compared.add(product.device)
    return product


def _has_scales_of_lines(operand: Operand) -> bool:
    """Return whether an operand has one scale, or one for each row or column."""
    rows, columns = operand.values.shape
    return not operand.inverse_scale.dim() or operand.inverse_scale.shape in ((rows, 1), (1, columns))


def _are_right(
    product: Tensor, left: Sequence[Operand], right: Sequence[Operand], sizes: Sequence[int]
) -> bool:
    """Return whether the product of every expert is right: one with another's scales may be wrong alone."""
    return all(map(_is_right, torch.split(product, list(sizes)), left, right))


def _is_right(product: Tensor, left: Operand, right: Operand) -> bool:
    a, b = (
        operand.values.double() * operand.inverse_scale.double()
        for operand in map(without_bytes, (left, right))
    )
    # `<=` is False for NaN, too.
    return bool(((product.double() - a @ b).abs() <= a.abs() @ b.abs() * TOLERANCE).all())


def _arguments_of_units(
    left: Sequence[Operand], right: Sequence[Operand], sizes: Sequence[int]
) -> tuple[Any, ...]:
    """Both matrices, the scales of rows and of columns, and the ends of the groups.

    torch takes scales of rows and columns only. FP8 units need the left matrix by rows, the right one by
    columns.
    """
    rows = [operand.values for operand in left]
    columns = [operand.values.t() for operand in right]
    # torch does not concatenate all FP8 dtypes.
    a = torch.cat([value.contiguous().view(torch.uint8) for value in rows]).view(rows[0].dtype)
    b = torch.stack([value.contiguous().view(torch.uint8) for value in columns]).view(columns[0].dtype).mT
    a_scale = torch.cat(
        [operand.inverse_scale.expand(size, 1) for size, operand in zip(sizes, left, strict=True)]
    )
    b_scale = torch.stack([operand.inverse_scale.expand(1, b.shape[2]).flatten() for operand in right])
    return a, b, a_scale.flatten().contiguous(), b_scale.contiguous(), _ends(sizes, a.device)


def _warn(what: str, reason: str) -> None:
    warnings.warn(
        f"{what}, because torch's grouped product failed ({reason.splitlines()[0]}).",
        RuntimeWarning,
        stacklevel=4,
    )
