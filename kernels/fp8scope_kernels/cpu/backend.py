"""Calls the functions of csrc/kernels.cpp with tensors.

The kernels are C++ and not a compiled graph, because the CPU code of torch.compile counts in float32 pools,
which costs 60 % of the cast. Counting in the bytes that were written costs a tenth of that, the cast itself
takes half the time, and nothing is compiled at run time.
"""

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels.cpu.library import library
from fp8scope_kernels.formats import E4M3, Format
from fp8scope_kernels.plain_tensors import READABLE_DTYPES, check_memory, in_memory_order
from fp8scope_kernels.random_stream import WORD, Draw
from fp8scope_kernels.recipes import Block, Microscaling, Nonfinite, Recipe
from fp8scope_kernels.statistics import STATISTICS

ELEMENTS_PER_THREAD = 2**16
"""Fewer elements are not worth waking a thread."""

COUNTS, AMAX = 1, 2

LOW_ADDRESS = 2**32
"""Addresses below may be offsets into freed memory. To look at the memory itself takes longer."""

INF = 0x7F800000
"""The bits of a float32 Inf."""


class _Format(ctypes.Structure):
    _fields_ = (
        ("max", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("smallest_normal", ctypes.c_float),
        ("smallest_subnormal", ctypes.c_float),
        ("mantissa_bits", ctypes.c_int32),
        ("bias", ctypes.c_int32),
        ("nan", ctypes.c_int32),
        ("max_exponent", ctypes.c_int32),
        ("accepted", ctypes.c_uint32),
    )


class _Counts(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("zeros", "flushed", "below", "saturated", "nonfinite", "blocks")
        ),
        *((name, ctypes.c_float) for name in ("smallest", "median", "largest")),
    )


class _Draw(ctypes.Structure):
    _fields_ = (
        ("key", ctypes.c_uint32 * 2),
        ("call", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("offset", ctypes.c_uint32),
        ("groups", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class _Row(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_double) for name in STATISTICS)


class Quantized(NamedTuple):
    """The result of one pass: q as `data`, and numbers, which are 0 unless they were requested.

    `amax` is of the finite elements; `underflow`, `subnormal`, `saturated` and `nonfinite` count elements.
    """

    data: Tensor
    amax: float
    underflow: int
    subnormal: int
    saturated: int
    nonfinite: int


def choose_scale(amax: float, top: float, power_of_two: bool, otherwise: float) -> float:
    """`amax_to_scale` of one number: `top` / amax in float32, `otherwise` where amax is 0 or not finite."""
    result: float = library().fp8scope_scale(amax, top, power_of_two, otherwise)
    return result


def past_scale(history: Tensor, scale: Tensor, calls: Tensor, interval: int, top: float) -> float:
    """The delayed scale, `top` / max of the history; written to `scale` at every `interval`-th call.

    Here and in `remember`, buffers are contiguous, on the CPU, not empty, and float32 (`calls` is int64).
    """
    result: float = library().fp8scope_past_scale(
        _pointer(history), history.numel(), _pointer(scale), _pointer(calls), interval, top
    )
    return result


def remember(history: Tensor, calls: Tensor, amax: float) -> None:
    """Insert `amax` at the front of the history, drop its last entry, and count the call; nothing for 0."""
    library().fp8scope_remember(_pointer(history), history.numel(), _pointer(calls), amax)


def measure(x: Tensor) -> float:
    """Max of abs(x), x of any shape on the CPU; 0 for an empty tensor, Inf or NaN if an element is."""
    x = _readable(x)
    result: float = library().fp8scope_measure(x.data_ptr(), x.numel(), _is_wide(x), _threads(x))
    return result


def observe(x: Tensor, address: int) -> int:
    """Add `numel`, `amax` and `nonfinite` of x (any shape, READABLE_DTYPES) to the row at `address`; scale 1.

    The row is float64 [len(STATISTICS)] on the CPU. Returns the number of non-finite elements of x. Float64
    elements are rounded to float32 first.
    """
    repeat = 1
    if not x.is_contiguous():
        x, repeat = in_memory_order(x)
    size = x.numel()
    check_memory(x)
    threads = 1 if size < 2 * ELEMENTS_PER_THREAD else _threads(x)
    nonfinite: int = library().fp8scope_observe(
        x.data_ptr(), size, repeat, READABLE_DTYPES[x.dtype], threads, address
    )
    return nonfinite


def count_again(size: int, nonfinite: int, address: int) -> None:
    """Count a tensor again that `observe` has read and that has not changed since."""
    row = _Row.from_address(address)
    row.numel += size
    row.nonfinite += nonfinite


def norm(tensors: Sequence[Tensor]) -> float:
    """The L2 norm over all elements of float32 tensors on the CPU, in any dense layout."""
    dense = [x if x.is_contiguous() else _without_repeats(x) for x in tensors]
    number = len(dense)
    pointers = [x.data_ptr() for x in dense]
    if min(pointers, default=0) < LOW_ADDRESS:
        for x in dense:
            check_memory(x)
    addresses = (ctypes.c_void_p * number)(*pointers)
    sizes = (ctypes.c_int64 * number)(*[x.numel() for x in dense])
    squares: float = library().fp8scope_squares(addresses, sizes, number)
    return math.sqrt(squares)


def _without_repeats(x: Tensor) -> Tensor:
    ordered, repeat = in_memory_order(x)
    return ordered if repeat == 1 else x.contiguous()


def inspect(x: Tensor, scale: float, limit: float) -> tuple[float, int, int]:
    """Three numbers of x, of any shape on the CPU.

    They are amax, the number of finite elements with abs(x * scale) > limit, and that of non-finite elements.
    """
    x, counts = _readable(x), _Counts()
    amax: float = library().fp8scope_inspect(
        x.data_ptr(), x.numel(), _is_wide(x), scale, limit, ctypes.byref(counts)
    )
    return amax, counts.saturated, counts.nonfinite


def quantize(
    x: Tensor,
    scale: float,
    format: Format,
    dtype: torch.dtype,
    row: Tensor | None = None,
    extent: tuple[float, int] | None = None,
    *,
    measure: bool = False,
    nonfinite: Nonfinite = "propagate",
    draw: Draw | None = None,
) -> Quantized:
    """x [any shape] times `scale`, clamped and rounded, in the format's dtype or in bfloat16.

    Statistics are added to `row`. `extent`: amax and the number of non-finite elements, if known. Otherwise
    the same pass measures them if there is a row, or with `measure`. `nonfinite`: what Inf becomes. `draw`:
    round at random by these words.
    """
    x, target = _readable(x), _writable(row)
    bounds, bad = extent or (math.inf, 0)
    counts = _Counts(nonfinite=bad)
    data = _empty(x, x.shape, dtype)
    measuring = measure or (row is not None and extent is None)
    wanted = (AMAX if measuring else 0) | (COUNTS if row is not None else 0)
    amax = library().fp8scope_quantize(
        *(x.data_ptr(), data.data_ptr(), x.numel(), _is_wide(x), dtype.itemsize == 1, scale),
        *(ctypes.byref(_parameters(format, nonfinite)), wanted, _threads(x), bounds, _address(target)),
        *(ctypes.byref(counts), _reference(draw)),
    )
    _write_back(row, target)
    flushed = counts.flushed
    small = (flushed - counts.zeros, counts.below - flushed)
    amax = amax if measuring or extent is not None else 0.0
    return Quantized(data, amax, *small, counts.saturated, counts.nonfinite)


def quantize_blocks(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    dtype: torch.dtype,
    row: Tensor | None,
    block_row: Tensor | None,
    draw: Draw | None = None,
) -> tuple[Tensor, Tensor]:
    """The matrix x, which is not empty, in blocks of `grid` (no zeros): q in `dtype`, and the blocks' scales.

    Scales are float32 [block rows, 1, block columns, 1]. Statistics are added to the rows. `draw`: round
    blocks of one row at random by these words.
    """
    x, target, block_target = _readable(x), _writable(row), _writable(block_row)
    (rows, columns), (height, width) = x.shape, grid
    data = _empty(x, x.shape, dtype)
    scales = _empty(x, (-(-rows // height), 1, -(-columns // width), 1), torch.float32)
    rule = _scale_rule(recipe)
    library().fp8scope_quantize_blocks(
        *(x.data_ptr(), data.data_ptr(), scales.data_ptr(), rows, columns, height, width, _is_wide(x)),
        *(dtype.itemsize == 1, rule, ctypes.byref(_parameters(format, recipe.nonfinite)), _threads(x)),
        *(_address(target), _address(block_target), _reference(draw)),
    )
    _write_back(row, target)
    _write_back(block_row, block_target)
    return data, scales


def round_blocks(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    dtype: torch.dtype,
    row: Tensor | None,
    block_row: Tensor | None,
) -> Tensor:
    """q / scale of `quantize_blocks`, rounded to `dtype` (bfloat16 or float32), in one pass; to nearest."""
    x, target, block_target = _readable(x), _writable(row), _writable(block_row)
    (rows, columns), (height, width) = x.shape, grid
    out = _empty(x, x.shape, dtype)
    scales = _empty(x, (-(-rows // height) * -(-columns // width),), torch.float32)
    library().fp8scope_round_blocks(
        *(x.data_ptr(), out.data_ptr(), scales.data_ptr(), rows, columns, height, width, _is_wide(x)),
        *(_is_wide(out), _scale_rule(recipe), ctypes.byref(_parameters(format, recipe.nonfinite))),
        *(_threads(x), _address(target), _address(block_target)),
    )
    _write_back(row, target)
    _write_back(block_row, block_target)
    return out


def quantize_columns(
    x: Tensor, format: Format, height: int, recipe: Recipe, dtype: torch.dtype, *, divide: bool
) -> tuple[Tensor, Tensor]:
    """Quantise runs of `height` elements of the columns of x, a contiguous matrix that is not empty.

    Returns q in bfloat16, or with `divide` q / scale rounded to `dtype` (bfloat16 or float32), as x lies in
    memory; and the scales, float32 [runs, columns].
    """
    x = _readable(x)
    rows, columns = x.shape
    out = _empty(x, x.shape, dtype if divide else torch.bfloat16)
    scales = _empty(x, (-(-rows // height), columns), torch.float32)
    library().fp8scope_quantize_columns(
        *(x.data_ptr(), out.data_ptr(), scales.data_ptr(), rows, columns, height, _is_wide(x)),
        *(_is_wide(out), divide, _scale_rule(recipe), ctypes.byref(_parameters(format, recipe.nonfinite))),
        _threads(x),
    )
    return out, scales


def quantize_nvfp4(
    x: Tensor,
    format: Format,
    grid: Block,
    nonfinite: Nonfinite,
    tensor_scale: float,
    row: Tensor | None,
    block_row: Tensor | None,
    draw: Draw | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize_blocks` with E4M3 scales below `tensor_scale`: q in bfloat16, and the blocks' scales."""
    x, target, block_target = _readable(x), _writable(row), _writable(block_row)
    (rows, columns), (height, width) = x.shape, grid
    data = _empty(x, x.shape, torch.bfloat16)
    scales = _empty(x, (-(-rows // height), 1, -(-columns // width), 1), torch.float32)
    library().fp8scope_quantize_nvfp4(
        *(x.data_ptr(), data.data_ptr(), scales.data_ptr(), rows, columns, height, width, _is_wide(x)),
        *(tensor_scale, ctypes.byref(_parameters(format, nonfinite))),
        *(ctypes.byref(_parameters(E4M3, "propagate")), _threads(x)),
        *(_address(target), _address(block_target), _reference(draw)),
    )
    _write_back(row, target)
    _write_back(block_row, block_target)
    return data, scales


def rotate(x: Tensor, minus: int) -> Tensor:
    """`hadamard.rotate` of the matrix x, which is not empty. The bits of `minus` are the signs."""
    x = _readable(x)
    out = _empty(x, (len(x), -(-x.shape[1] // 16) * 16), torch.float32)
    library().fp8scope_rotate(
        x.data_ptr(), out.data_ptr(), *x.shape, _is_wide(x), minus & 0xFFFF, _threads(x)
    )
    return out


def dequantize_blocks(
    values: Tensor, scales: Tensor, grid: Block, dtype: torch.dtype, *, multiply: bool = False
) -> Tensor:
    """values / scale of each element's block, or their product, rounded once to bfloat16 or float32: `dtype`.

    `values`: bfloat16 [rows, columns]; `scales`: float32, as from `quantize_blocks`.
    """
    values, scales = values.contiguous(), scales.contiguous()
    out = _empty(values, values.shape, dtype)
    library().fp8scope_dequantize_blocks(
        *(values.data_ptr(), scales.data_ptr(), out.data_ptr(), *values.shape, *grid),
        *(_is_wide(out), multiply, _threads(values)),
    )
    return out


def scale_product(product: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """product * left * right in float32, rounded once to `dtype` (bfloat16 or float32).

    `product`: bfloat16 [rows, columns]; `left`: float32 [rows, 1]; `right`: float32 [1, columns].
    """
    product, left, right = product.contiguous(), left.contiguous(), right.contiguous()
    out = _empty(product, product.shape, dtype)
    library().fp8scope_scale_product(
        *(product.data_ptr(), left.data_ptr(), right.data_ptr(), out.data_ptr(), *product.shape),
        *(_is_wide(out), _threads(product)),
    )
    return out


def exponents(x: Tensor, bins: Tensor) -> None:
    """Add to `bins`, float64 [EXPONENT_BINS] on the CPU, how many elements of x have each exponent."""
    x = _readable(x)
    library().fp8scope_exponents(x.data_ptr(), x.numel(), _is_wide(x), _threads(x), _pointer(bins))


def accumulate_sample(sample: Tensor, x: Tensor, values: Tensor, inverse_scale: Tensor) -> None:
    """`sampling.accumulate_sample` for x in bfloat16 or float32 and `values` in FP8 or bfloat16.

    `inverse_scale`: float32, one number or one for each of x's rows.
    """
    x, values, target = _readable(x), values.bfloat16().contiguous(), _writable(sample)
    inverse_scale = inverse_scale.contiguous()
    rows = inverse_scale.numel()
    library().fp8scope_sample(
        *(x.data_ptr(), values.data_ptr(), inverse_scale.data_ptr(), rows, x.numel() // rows),
        *(_is_wide(x), _threads(x), _address(target)),
    )
    _write_back(sample, target)


def _scale_rule(recipe: Recipe) -> int:
    """The rule by which the kernels choose a block's scale; blocks.h explains the numbers."""
    if isinstance(recipe, Microscaling):
        return 2 if recipe.rounding == "floor" else 1
    return int(getattr(recipe, "power_of_two", False))


def _writable(row: Tensor | None) -> Tensor | None:
    """The row, or a contiguous float64 copy of it for `_write_back`."""
    # Nearly every row is contiguous float64 already; this runs for every tensor of every step.
    if row is None or (row.dtype is torch.float64 and row.is_contiguous()):
        return row
    return row.double().contiguous()


def _address(row: Tensor | None) -> int | None:
    return None if row is None else _pointer(row)


def _pointer(x: Tensor) -> int:
    """The address of a tensor that is not empty."""
    address = x.data_ptr()
    if not address:
        raise RuntimeError(f"A tensor of shape {tuple(x.shape)} has no memory.")
    return address


def _empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    out = like.new_empty(shape, dtype=dtype)
    # Under FakeTensorMode, new tensors have no memory, even if they are made from one that has.
    if type(out) is not Tensor:
        raise TypeError(
            "Under FakeTensorMode a tensor with numbers cannot be quantised: make it in the mode."
        )
    return out


def _write_back(row: Tensor | None, target: Tensor | None) -> None:
    if row is not None and target is not None and target is not row:
        row.copy_(target)


def _readable(x: Tensor) -> Tensor:
    # A view that negates shares its memory with the tensor before the sign changed.
    x = x.detach().resolve_neg()
    return (x if x.dtype in (torch.bfloat16, torch.float32) else x.float()).contiguous()


def _is_wide(x: Tensor) -> bool:
    return x.dtype == torch.float32


def _threads(x: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // ELEMENTS_PER_THREAD))


def _reference(draw: Draw | None) -> Any:
    """The argument of a kernel for these words; None to round to nearest."""
    if draw is None:
        return None
    seed, call = draw.state.tolist()
    streams = (None, 0) if draw.groups is None else (_pointer(draw.groups), draw.groups.shape[1])
    key = (ctypes.c_uint32 * 2)(seed & WORD, (seed >> 32) & WORD)
    words = _Draw(key, call & WORD, draw.rank, draw.offset & WORD, *streams)
    return ctypes.byref(words)


@cache
def _parameters(format: Format, nonfinite: Nonfinite) -> _Format:
    accepted = INF if nonfinite == "clamp" else INF - 1
    return _Format(
        *(format.max, format.limit, format.smallest_normal, format.smallest_subnormal),
        # A format without NaN is written as bfloat16, which has one.
        *(format.mantissa_bits, format.bias, format.nan_code or 0x7F, format.max_exponent, accepted),
    )
