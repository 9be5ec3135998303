"""Launches the Triton kernels: the same bits and counts as reference.py, in one pass over the tensor.

Nothing here waits for the device or reads from it, so that every call can be captured in a CUDA graph.
"""

from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels import devices
from fp8scope_kernels.formats import E8M0, Format
from fp8scope_kernels.plain_tensors import check_memory, in_memory_order
from fp8scope_kernels.random_stream import COUNTERS, GROUP, Draw
from fp8scope_kernels.recipes import Block, BlockScaling, Microscaling, Nonfinite, Recipe, RowwiseScaling

FLAT = (1, 4096)
"""Rows and columns of a tile of a contiguous tensor, which is read as one row."""
SQUARE = (64, 64)
"""The same for other strides, or to write a transpose: both sides are then whole cache lines."""
BLOCK_TILE = 4096
"""Elements of a tile that is a column of blocks."""
RANDOM_TILE = 4096
"""Elements of a tile that is rounded at random."""
OBSERVED_TILE = 4096
OBSERVING_PROGRAMS = 528
"""A few for each multiprocessor: every program ends with atomic operations on the same numbers."""
MAX_BLOCK_HEIGHT = 128
SCALE_RANGE = (torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max)


HISTORY_PART = 256
"""Entries of an amax history that are read at a time."""


class ChosenScale(NamedTuple):
    """A scale and its inverse, float32 without dimensions, chosen on the device."""

    scale: Tensor
    inverse: Tensor


class AmaxHistory(NamedTuple):
    """The buffers of a delayed state: float32 [length], and the number of calls, int64."""

    amaxes: Tensor
    calls: Tensor


class Quantized(NamedTuple):
    """The output of one pass; None for what was not requested.

    `data`: q, shape of x. `transposed`: q of the matrix x transposed, contiguous. `amax`, float32, and
    `nonfinite`, float64, without dimensions; see `Extent`.
    """

    data: Tensor
    transposed: Tensor | None
    amax: Tensor | None
    nonfinite: Tensor | None


def measure(x: Tensor) -> tuple[Tensor, Tensor]:
    """(amax, float32; non-finite elements, float64), both without dimensions, of x of any shape."""
    amax, nonfinite = _extent(x)
    if x.numel():
        x = _readable(x)
        partials, programs = _tiles(x, None, None, None, {**_NO_FORMAT, "MEASURE": True})
        _finish(x, partials, programs, amax, nonfinite, measured=False)
    return amax, nonfinite


def measure_and_scale(
    x: Tensor, top: float, *, power_of_two: bool, store: Tensor | None
) -> tuple[tuple[Tensor, Tensor], ChosenScale]:
    """`measure` of x, which is not empty, and the scale `top` / amax of `amax_to_scale`: two launches.

    The scale is written to `store` (float32 without dimensions), too.
    """
    amax, nonfinite = _extent(x)
    chosen = torch.empty(2, dtype=torch.float32, device=x.device)
    partials, programs = _tiles(_readable(x), None, None, None, {**_NO_FORMAT, "MEASURE": True})
    with _device(x):
        _kernels().current_scale[(1,)](
            partials, programs, amax, nonfinite, chosen if store is None else store, chosen, top,
            **_SCALES, POWER_OF_TWO=power_of_two, HAS_SCALE=store is not None, enable_fp_fusion=False,
        )  # fmt: skip
    return (amax, nonfinite), ChosenScale(*chosen)


def delayed_scale(history: AmaxHistory, scale: Tensor, interval: int, top: float) -> ChosenScale:
    """The scale of a delayed state for its next call, `top` / max of the amaxes: one launch.

    It is written to `scale`, float32 without dimensions, at every `interval`-th call.
    """
    chosen = torch.empty(2, dtype=torch.float32, device=scale.device)
    with _device(scale):
        _kernels().delayed_scale[(1,)](
            history.amaxes, scale, history.calls, chosen, history.amaxes.numel(), interval, top,
            **_SCALES, PART=HISTORY_PART, enable_fp_fusion=False,
        )  # fmt: skip
    return ChosenScale(*chosen)


def observe(x: Tensor, row: Tensor) -> bool:
    """Add `numel`, `amax` and `nonfinite` of x (floating, any shape) to its row, and set the scale to 1.

    One launch. x is copied first only if it is float64 or its elements overlap.
    """
    _check_row(x, row)
    check_memory(x)
    x, repeat = (x, 1) if x.is_contiguous() else in_memory_order(x)
    if not x.numel():
        row[2] = 1.0
        return True
    x = _readable(x)
    tiles = _ceil(x.numel(), OBSERVED_TILE)
    with _device(x):
        _kernels().observe_tiles[(min(tiles, OBSERVING_PROGRAMS),)](
            x, row, row.view(torch.int64), x.numel(), repeat, tiles, WIDTH=OBSERVED_TILE
        )
    return True


def quantize(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None = None,
    *,
    saturate: bool = True,
    extent: tuple[Tensor, Tensor] | None = None,
    measure: bool = False,
    transpose: bool = False,
    nonfinite: Nonfinite = "propagate",
    history: AmaxHistory | None = None,
) -> Quantized:
    """q of x (floating, any shape) in `dtype`, the format's own or bfloat16; adds statistics to `row`.

    `extent`: the result of `measure`, if known. Otherwise the same pass measures x if there is a row, or with
    `measure`. `transpose` (of a matrix): write q transposed as well. `nonfinite`: what Inf becomes.
    `history`: add the amax that is measured, and count the call.
    """
    _check_row(x, row)
    x = _readable(x)
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    transposed = data.new_empty(x.shape[::-1]) if transpose else None
    scale = scale.to(x.device, torch.float32)
    measuring = extent is None and (measure or row is not None)
    amax, bad = extent or (_extent(x) if measuring else (None, None))
    partials, programs = None, 0
    if x.numel():
        options = {
            **_format_bits(format),
            "BEYOND": _beyond(format, dtype),
            "SATURATE": saturate,
            "PROPAGATE": nonfinite == "propagate",
            "BYTES": dtype.itemsize == 1,
            "CAST": True,
            "TRANSPOSE": transpose,
            "COUNT": row is not None,
            "MEASURE": measuring,
        }
        turned = None if transposed is None else transposed.view(bits)
        counted = None if measuring or row is None else (row, amax, bad)
        partials, programs = _tiles(x, scale, data.view(bits), turned, options, counted)
    if measuring or (row is not None and not x.numel()):
        _finish(x, partials, programs, amax, bad, scale, row, measured=not measuring, history=history)
    return Quantized(data, transposed, amax, bad)


def quantize_at_random(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    draw: Draw,
    row: Tensor | None = None,
    *,
    extent: tuple[Tensor, Tensor] | None = None,
    nonfinite: Nonfinite = "propagate",
) -> Quantized:
    """`quantize`, rounded at random by the words of `draw`. x is copied if it is not contiguous."""
    _check_row(x, row)
    x = _readable(x).contiguous()
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    data = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale, state = scale.to(x.device, torch.float32), draw.state.to(x.device)
    measuring = extent is None and row is not None
    amax, bad = extent or (_extent(x) if measuring else (None, None))
    partials, programs = None, 0
    if x.numel():
        tiles = _ceil(x.numel(), RANDOM_TILE)
        partials, programs = _partials(x, tiles)
        unused = ("MAX_CODE",)
        with _device(x):
            _kernels().quantize_at_random_tiles[(programs,)](
                x, scale, data.view(bits), partials, state, draw.rank, x.numel(), tiles,
                **{name: value for name, value in _format_bits(format).items() if name not in unused},
                PROPAGATE=nonfinite == "propagate", BYTES=dtype.itemsize == 1, COUNT=row is not None,
                MEASURE=measuring, GROUPS=RANDOM_TILE // GROUP, COUNTERS=COUNTERS, enable_fp_fusion=False,
            )  # fmt: skip
    if row is not None:
        _finish(x, partials, programs, amax, bad, scale, row, measured=not measuring)
    return Quantized(data, None, amax, bad)


def takes_grid(grid: Block) -> bool:
    """Return whether `quantize_blocks` supports blocks of this height and width (neither is 0)."""
    height = grid[0]
    return height <= MAX_BLOCK_HEIGHT and height & (height - 1) == 0


def quantize_blocks(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    row: Tensor | None = None,
    block_row: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q as bfloat16 [rows, columns] and scales [block rows, 1, block columns, 1]; x is not empty."""
    _check_row(x, row)
    _check_row(x, block_row)
    x = _readable(x)
    rows, columns = x.shape
    block_height, block_width = grid
    tile_width = min(max(_power_of_two(block_width), 16), 1024 if block_height == 1 else MAX_BLOCK_HEIGHT)
    tile_height = block_height if block_height > 1 else min(_power_of_two(rows), BLOCK_TILE // tile_width)
    across = _ceil(columns, block_width)
    tiles = _ceil(rows, tile_height) * across
    data = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)
    scales = torch.empty(_ceil(rows, block_height), 1, across, 1, dtype=torch.float32, device=x.device)
    partials, programs = _partials(x, tiles)
    bits = {name: value for name, value in _format_bits(format).items() if name not in ("MAX_CODE", "NAN")}
    counting = row is not None or block_row is not None
    with _device(x):
        _kernels().quantize_block_tiles[(programs,)](
            x, data.view(torch.int16), scales, partials, rows, columns, *x.stride(), block_width, across,
            tiles, **_scale_rule(recipe, format), **bits,
            PROPAGATE=recipe.nonfinite == "propagate", TALL=block_height > 1, COUNT=counting,
            HEIGHT=tile_height, WIDTH=tile_width, enable_fp_fusion=False,
            num_warps=8 if tile_height * tile_width > BLOCK_TILE else 4,
        )  # fmt: skip
    if counting:
        amax, nonfinite = _extent(x)
        median = scales.median()
        _finish(x, partials, programs, amax, nonfinite, median, row, block_row, measured=False)
        if block_row is not None:
            block_row[0] += scales.numel()
            block_row[2:] = torch.stack((scales.min(), median, scales.max()))
    return data, scales


def _tiles(
    x: Tensor,
    scale: Tensor | None,
    q: Tensor | None,
    q_t: Tensor | None,
    options: dict[str, Any],
    counted: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, int]:
    """Launch the pass over x with one scale; returns the partials and the number of programs.

    `counted`: the row to count in, and the extent of x, if it was measured before.
    """
    matrix = x.reshape(1, -1) if x.dim() < 2 or (x.is_contiguous() and q_t is None) else x
    matrix = matrix.reshape(-1, matrix.shape[-1])
    rows, columns = matrix.shape
    height, width = FLAT if rows == 1 and q_t is None else SQUARE
    across = _ceil(columns, width)
    tiles = _ceil(rows, height) * across
    partials, programs = _partials(x, tiles)
    with _device(x):
        # Outputs that are not written still need an address; any will do.
        _kernels().quantize_tiles[(programs,)](
            matrix, partials if scale is None else scale, partials if q is None else q,
            partials if q_t is None else q_t, partials, *(counted or (partials,) * 3),
            rows, columns, *matrix.stride(), across, tiles,
            **options, HEIGHT=height, WIDTH=width, enable_fp_fusion=False,
        )  # fmt: skip
    return partials, programs


def _finish(
    x: Tensor,
    partials: Tensor | None,
    programs: int,
    amax: Tensor | None,
    nonfinite: Tensor | None,
    scale: Tensor | None = None,
    row: Tensor | None = None,
    block_row: Tensor | None = None,
    *,
    measured: bool,
    history: AmaxHistory | None = None,
) -> None:
    """Add up the partials (None for an empty tensor) into the rows and, unless `measured`, the extent.

    With a `history`, add the amax to it.
    """
    partials = _partials(x, 1)[0] if partials is None else partials
    with _device(x):
        _kernels().finish[(1,)](
            partials, programs, x.numel(), amax, nonfinite, partials if scale is None else scale,
            partials if row is None else row, partials if block_row is None else block_row,
            *(history or (partials, partials)), 0 if history is None else history.amaxes.numel(),
            MEASURED=measured, HAS_ROW=row is not None, HAS_BLOCK_ROW=block_row is not None,
            HAS_HISTORY=history is not None, PART=HISTORY_PART,
        )  # fmt: skip


@cache
def _kernels() -> ModuleType:
    # Imported by the first call: Triton may be missing, and importing it takes a second.
    from fp8scope_kernels.triton import kernels

    return kernels


def _partials(x: Tensor, tiles: int) -> tuple[Tensor, int]:
    kernels = _kernels()
    programs = min(tiles, kernels.MAX_PROGRAMS)
    return torch.empty(programs, kernels.PARTIALS, dtype=torch.int64, device=x.device), programs


def _extent(x: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for an extent, which the last launch writes; zeros for an empty tensor, which has none."""
    make = torch.empty if x.numel() else torch.zeros
    return (
        make((), dtype=torch.float32, device=x.device),
        make((), dtype=torch.float64, device=x.device),
    )


def _readable(x: Tensor) -> Tensor:
    """x in a dtype that the kernels read: float32, float16, or bfloat16's bits as int16."""
    x = x.detach().resolve_neg()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16)
    return x if x.dtype in (torch.float32, torch.float16) else x.float()


def _check_row(x: Tensor, row: Tensor | None) -> None:
    if row is not None and (row.device != x.device or row.dtype != torch.float64 or not row.is_contiguous()):
        raise ValueError(
            f"The statistics of a tensor on {x.device} need a contiguous float64 row there, got {row.dtype} "
            f"on {row.device}: make the StatisticsBuffer with device={str(x.device)!r}."
        )


def _device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    return devices.activated(x.device)


def _bits_of(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))


@cache
def _format_bits(format: Format) -> dict[str, Any]:
    """A format as the kernels' constants; MAX, LIMIT and NORMAL are the bits of float32 numbers."""
    top = format.max_exponent + format.bias
    mantissa = round((format.max / 2.0**format.max_exponent - 1) * 2**format.mantissa_bits)
    return {
        "MAX": _bits_of(format.max),
        "LIMIT": _bits_of(format.limit),
        "NORMAL": _bits_of(format.smallest_normal),
        "MANTISSA": format.mantissa_bits,
        "BIAS": format.bias,
        "MAX_CODE": (top << format.mantissa_bits) + mantissa,
        # A format without NaN is written as bfloat16, which has one.
        "NAN": format.nan_code or 0x7F,
    }


_SCALES: dict[str, Any] = {"MIN_SCALE": SCALE_RANGE[0], "MAX_SCALE": SCALE_RANGE[1]}
_NO_FORMAT: dict[str, Any] = {
    **dict.fromkeys(("MAX", "LIMIT", "NORMAL", "MANTISSA", "BIAS", "MAX_CODE", "BEYOND", "NAN"), 0),
    **dict.fromkeys(("SATURATE", "PROPAGATE", "BYTES", "CAST", "TRANSPOSE", "COUNT"), False),
}


@cache
def _beyond(format: Format, dtype: torch.dtype) -> int:
    """The bits stored, without sign, for more than M where nothing clamps: of Inf, NaN or M."""
    beyond = torch.inf if format.has_infinity else torch.nan if format.has_nan else format.max
    if dtype.itemsize == 1:
        return 0x7C if format.has_infinity else format.nan_code or 0x7F
    return 0x7FC0 if beyond != beyond else _bits_of(beyond) >> 16


def _scale_rule(recipe: Recipe, format: Format) -> dict[str, Any]:
    """Return how the kernel computes a block's scale: `amax_to_block_scale` in constants."""
    smallest, largest = SCALE_RANGE
    if isinstance(recipe, Microscaling) and recipe.rounding == "floor":
        power = 2.0**format.max_exponent
        return {"LARGEST": power, "MIN_SCALE": smallest, "MAX_SCALE": E8M0.max, "MODE": 2}
    assert isinstance(recipe, Microscaling | RowwiseScaling | BlockScaling)
    powers = isinstance(recipe, Microscaling) or recipe.power_of_two
    return {
        "LARGEST": format.max, "MIN_SCALE": smallest, "MAX_SCALE": largest, "MODE": int(powers)
    }  # fmt: skip


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _power_of_two(number: int) -> int:
    """The smallest power of two at or above `number`."""
    return 1 << max(number - 1, 0).bit_length()
