"""Quantisation in plain torch: the definition that every backend is measured against.

A tensor passes through these steps: `measure` (amax, non-finite elements), `amax_to_scale`, multiply, clamp,
round to the format, count. Rounding is to nearest, ties to even, as in torch's own cast, or stochastic.
Nothing here chooses a backend; see quantization.py for that.
"""

import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fp8scope_kernels.formats import E2M1, E4M3, E8M0, Format
from fp8scope_kernels.plain_tensors import can_branch_on
from fp8scope_kernels.random_stream import Draw, RandomStream
from fp8scope_kernels.recipes import NVFP4, Block, BlockScaling, Microscaling, Recipe, RowwiseScaling

EXPONENT_BITS = 0x7F800000
"""The exponent field of a float32."""

MAX_SCALE = torch.finfo(torch.float32).max
MIN_SCALE = torch.finfo(torch.float32).tiny

CPU_CHUNK = 2**19
"""Elements cast at a time on a CPU, so that intermediate results stay in its cache."""
DEVICE_CHUNK = 2**24
"""The same on other devices. Counts are float32 sums of ones, which are exact up to this number."""

Stochastic = bool | torch.Generator | RandomStream | Draw
"""False: round to nearest. Else round at random: with torch's default generator of the device (True), with
this generator, or with the next words of a stream of its own (`RandomStream`), or with these words (`Draw`).
"""


class Extent(NamedTuple):
    """The inputs of a scale: scalars on the tensor's device.

    `amax`: float32, max of abs(x) over the finite elements, 0 if there are none.
    `nonfinite`: float32 or float64, the number of NaN and Inf elements.
    """

    amax: Tensor
    nonfinite: Tensor


def measure(x: Tensor) -> Extent:
    """Amax and number of non-finite elements of x (floating, any shape, not empty)."""
    if can_branch_on(x):
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high).float()
        if amax < torch.inf:
            return Extent(amax, torch.zeros_like(amax))
    low, high = torch.aminmax(x.nan_to_num(0.0, 0.0, 0.0))
    return Extent(torch.maximum(-low, high).float(), (~torch.isfinite(x)).sum().double())


def amax_to_scale(
    amax: Tensor, top: float, power_of_two: bool = False, otherwise: Tensor | float = 1.0
) -> Tensor:
    """s = `top` / amax in float32 (elementwise); `otherwise` where amax is 0 or not finite."""
    # Not `number / tensor`, which torch computes as a reciprocal and a product: two roundings.
    scale = torch.full_like(amax, top).div_(amax)
    if power_of_two:
        # A float32 without its mantissa bits is the power of two at or below it.
        scale = (scale.clamp(MIN_SCALE, MAX_SCALE).view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    else:
        scale.clamp_(MIN_SCALE, MAX_SCALE)
    return torch.where((amax > 0) & (amax < torch.inf), scale, otherwise)


def amax_to_mx_scale(amax: Tensor, format: Format, rounding: str) -> Tensor:
    """The multiplier s = 1/X for shared MX scales X, which E8M0 can hold: float32, shape of `amax`.

    `floor`: X = 2^(floor(log2 amax) - floor(log2 M)), as in OCP Microscaling Formats 1.0, section 6.3. The
    largest elements of a block may then saturate. `up`: X is the smallest power of two with amax / X <= M.
    X is 1 where amax is 0.
    """
    if rounding == "floor":
        # The float32 amax without its mantissa bits is the power of two with the same exponent.
        power = (amax.clamp(min=MIN_SCALE).view(torch.int32) & EXPONENT_BITS).view(torch.float32)
        scale = torch.full_like(power, 2.0**format.max_exponent).div_(power).clamp_(max=E8M0.max)
        return torch.where(amax > 0, scale, 1.0)
    return amax_to_scale(amax.float(), format.max, power_of_two=True)


def amax_to_block_scale(amax: Tensor, format: Format, recipe: Recipe) -> Tensor:
    """The multiplier of each block under `recipe`: float32, shape of `amax`."""
    if isinstance(recipe, Microscaling):
        return amax_to_mx_scale(amax, format, recipe.rounding)
    assert isinstance(recipe, RowwiseScaling | BlockScaling)
    return amax_to_scale(amax.float(), format.max, recipe.power_of_two)


def amax_to_nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """t = amax of the tensor / (6 * 448), M of E2M1 and of E4M3; at least float32's smallest normal."""
    return amax.float().div(E2M1.max * E4M3.max).clamp_(min=MIN_SCALE)


def amax_to_nvfp4_block_scale(amax: Tensor, tensor_scale: Tensor) -> Tensor:
    """b = (amax of the block / 6) / t, at most 448, rounded to E4M3: float32, shape of `amax`.

    An element x of the block has the code E2M1(x / (b * t)) and the value code * (b * t), each operation
    rounded to float32. Where b is 0 (of blocks 2^18 times smaller than the tensor's amax) all values are 0.
    """
    scale = amax.float().div(E2M1.max).div_(tensor_scale).clamp_(max=E4M3.max)
    return round_to_format(scale, E4M3)


# Rounding


def round_to_format(x: Tensor, format: Format) -> Tensor:
    """Round float32 x, abs(x) <= M, to the nearest value of the format, ties to even: float32. NaN stays NaN.

    Works for any format, also one without a torch dtype. It differs from a cast and back in one point: a
    negative value that rounds to zero becomes +0.
    """
    return round_(x.clone(), torch.empty_like(x), format)


def round_(x: Tensor, workspace: Tensor, format: Format) -> Tensor:
    """`round_to_format` in place; `workspace`, of the same shape, is overwritten.

    Adding and subtracting t = 1.5 * 2^(23-m) * p leaves multiples of p * 2^-m, because float32 rounds the
    sum. Here m is the number of the format's mantissa bits, and p is the power of two at or below abs(x), or
    the format's smallest normal if that is larger.
    """
    torch.bitwise_and(x.view(torch.int32), EXPONENT_BITS, out=workspace.view(torch.int32))
    workspace.clamp_(min=format.smallest_normal).mul_(1.5 * 2.0 ** (23 - format.mantissa_bits))
    return x.add_(workspace).sub_(workspace)


def infinite_to_nan_(scaled: Tensor, x: Tensor) -> Tensor:
    """Make `scaled`, float32, NaN with the sign of x wherever x (any floating dtype, same shape) is Inf."""
    nan = torch.full_like(scaled, torch.nan).copysign_(x)
    return scaled.copy_(torch.where(torch.isinf(x), nan, scaled))


def round_unsaturated_(scaled: Tensor, workspace: Tensor, format: Format) -> None:
    """As `round_`, but what rounds to more than M becomes Inf, NaN or M: the first that the format has."""
    # The sum in `round_` must not overflow float32.
    round_(scaled.clamp_(-4 * format.max, 4 * format.max), workspace, format)
    beyond = torch.inf if format.has_infinity else torch.nan if format.has_nan else format.max
    scaled.masked_fill_(scaled > format.max, beyond).masked_fill_(scaled < -format.max, -beyond)


def round_stochastically(x: Tensor, format: Format, stochastic: Stochastic = True) -> Tensor:
    """Round float32 x, abs(x) <= M, to one of the two neighbouring values of the format at random: float32.

    The value above is taken with probability (x - below) / (above - below), so that the expected value is x
    (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). Rounding to nearest instead loses
    everything that is small against the distance between two values. One random number of 24 bits decides
    per element: exact for normal numbers, off by less than 2^-24 for subnormal ones. Values of the format
    and NaN stay as they are. The same state of a generator or of a stream gives the same result.
    """
    # A pending negation is not in the bits.
    x = x.resolve_neg()
    power = (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32).clamp_(min=format.smallest_normal)
    step = power.mul_(2.0**-format.mantissa_bits)
    # Only the comparison is inexact: steps are powers of two, and x has at most 2^(m+1) of them.
    steps = x.abs().div_(step)
    below = steps.floor()
    return (below + (_chances(x, stochastic) < steps - below)).mul_(step).copysign_(x)


def _chances(x: Tensor, stochastic: Stochastic) -> Tensor:
    """A number from 0 to 1 for each element of x: a multiple of 2^-24, float32."""
    if isinstance(stochastic, RandomStream):
        stochastic = stochastic.draw()
    if isinstance(stochastic, Draw):
        return stochastic.chances(x)
    generator = stochastic if isinstance(stochastic, torch.Generator) else None
    return torch.rand(x.shape, generator=generator, device=x.device)


# One scale for the whole tensor


def quantize(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    counts: Tensor | None,
    saturate: bool,
    inside: bool,
    propagate: bool,
) -> Tensor:
    """q in `dtype`, the format's or bfloat16; adds [saturated, underflow, subnormal] to `counts`.

    `inside`: all elements are finite, and none of x*s is beyond M. `propagate`: Inf becomes NaN.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    for part, target in _chunks(x, out):
        scaled, workspace = _workspace(part)
        torch.mul(part, scale, out=scaled) if part.dtype == torch.float32 else scaled.copy_(part).mul_(scale)
        if counts is not None and not inside:
            counts[0] += _count_saturated(part, scaled, workspace, format)
        if propagate and not inside:
            infinite_to_nan_(scaled, part)
        if saturate and not inside:
            scaled.clamp_(-format.max, format.max)
        if not saturate:
            round_unsaturated_(scaled, workspace, format)
        elif dtype == torch.bfloat16:
            round_(scaled, workspace, format)
        target.copy_(scaled)
        if counts is not None:
            counts[1:] += _count_small(part, scaled, workspace, format)
    return out


def quantize_stochastically(
    x: Tensor, scale: Tensor, format: Format, stochastic: Stochastic, propagate: bool, count: bool
) -> tuple[Tensor, Tensor | None]:
    """q as float32, rounded at random, and with `count` [saturated, underflow, subnormal] as float64."""
    scaled = x.float() * scale
    clamped = scaled.clamp(-format.max, format.max)
    if propagate:
        infinite_to_nan_(clamped, x)
    q = round_stochastically(clamped, format, stochastic)
    return q, count_elements(x, scaled, q, format) if count else None


def count_elements(x: Tensor, scaled: Tensor, q: Tensor, format: Format) -> Tensor:
    """[saturated, underflow, subnormal] from x, x*s before clamping, and the rounded value q: float64 [3]."""
    magnitude = q.abs()
    saturated = (scaled.abs() > format.limit) & torch.isfinite(x)
    underflow = (x != 0) & (magnitude == 0)
    subnormal = (magnitude > 0) & (magnitude < format.smallest_normal)
    return torch.stack([mask.sum() for mask in (saturated, underflow, subnormal)]).double()


def _count_saturated(x: Tensor, scaled: Tensor, workspace: Tensor, format: Format) -> Tensor:
    """Finite elements with abs(x*s) > limit. NaN compares false; Inf compares true and is subtracted."""
    above = torch.abs(scaled, out=workspace).gt_(format.limit).sum()
    # A scale of 0 or NaN (torchao's, for a tensor with an Inf) puts no product above the limit.
    return (above - workspace.copy_(x).abs_().eq_(torch.inf).sum()).clamp_(min=0)


def _count_small(x: Tensor, q: Tensor, workspace: Tensor, format: Format) -> Tensor:
    """Underflowing and subnormal elements, float32 [2]; q, x*s before or after rounding, is overwritten.

    Rounding to nearest even flushes abs(x*s) <= half the smallest subnormal, and leaves a subnormal below
    the smallest normal less that half. Both hold for x*s and for its rounded value alike.
    """
    half = format.smallest_subnormal / 2
    q.abs_()
    # torch's CPU compares into float32 and sums it several times faster than booleans.
    flushed = torch.le(q, half, out=workspace).sum()
    small = torch.lt(q, format.smallest_normal - half, out=workspace).sum()
    zeros = torch.eq(x, 0, out=workspace).sum()
    return torch.stack((flushed - zeros, small - flushed))


def _chunks(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors, flattened, in chunks of the same elements; `out` is contiguous."""
    flat, target = x.reshape(-1), out.view(-1)
    size = CPU_CHUNK if x.is_cpu else DEVICE_CHUNK
    if flat.numel() <= size:
        yield flat, target
        return
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size], target[start : start + size]


_local = threading.local()


def _workspace(like: Tensor) -> tuple[Tensor, Tensor]:
    """Two uninitialised float32 tensors with as many elements as `like`.

    Each CPU thread keeps its own: allocating new memory each time costs more than the work in it.
    """
    size = like.numel()
    # What is kept must be a tensor with memory.
    if not can_branch_on(like):
        first, second = torch.empty(2, size, dtype=torch.float32, device=like.device)
        return first, second
    buffer: Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.shape[1] < size:
        # Tensors made in inference mode cannot be written to after it.
        with torch.inference_mode(False):
            buffer = _local.buffer = torch.empty(2, size, dtype=torch.float32, device="cpu")
    return buffer[0, :size], buffer[1, :size]


# A scale for each block


class QuantizedBlocks(NamedTuple):
    """A matrix in blocks: q [rows, columns], and float32 scales [block rows, 1, block columns, 1].

    It represents values / scale; with a `tensor_scale` (NVFP4), values * (scale * tensor_scale).
    """

    values: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None


def quantize_blocks(
    x: Tensor,
    format: Format,
    grid: Block,
    recipe: Recipe,
    row: Tensor | None,
    block_row: Tensor | None,
    dtype: torch.dtype,
    stochastic: Stochastic = False,
) -> QuantizedBlocks:
    """The matrix x, which is not empty, in blocks of `grid` (no zeros): q in `dtype`, and the blocks' scales.

    Statistics are added to the rows. `stochastic`: round at random, in the row-major order of x.
    """
    tiles = _tiles(x.detach().float(), grid)
    amax = tiles.nan_to_num(0.0, 0.0, 0.0).abs().amax((1, 3), keepdim=True)
    tensor_scale = None
    if isinstance(recipe, NVFP4):
        tensor_scale = amax_to_nvfp4_tensor_scale(amax.max())
        scale = amax_to_nvfp4_block_scale(amax, tensor_scale)
        scaled, multiplier = _divided(tiles, scale * tensor_scale)
    else:
        scale = multiplier = amax_to_block_scale(amax, format, recipe)
        scaled = tiles * scale
    clamped = scaled.clamp(-format.max, format.max)
    if recipe.nonfinite == "propagate" and not (can_branch_on(x) and bool(torch.isfinite(x).all())):
        infinite_to_nan_(clamped, tiles)
    rounded = None
    if stochastic is not False:
        rounded = _tiles(
            round_stochastically(_matrix(clamped, x.shape).contiguous(), format, stochastic), grid
        )
    if row is not None or block_row is not None:
        _count_blocks(row, block_row, x, tiles, scaled, rounded, multiplier, amax, format)
    if rounded is None:
        rounded = clamped if dtype == format.dtype else round_to_format(clamped, format)
    return QuantizedBlocks(_matrix(rounded, x.shape).to(dtype), scale, tensor_scale)


def _divided(tiles: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor]:
    """tiles / divisor, 0 where the divisor is 0 (Inf stays Inf); and 1 / divisor, 1 where it is 0."""
    empty = divisor == 0
    scaled = tiles / divisor.masked_fill(empty, torch.inf)
    multiplier = torch.where(empty, 1.0, divisor.reciprocal())
    return torch.where(torch.isinf(tiles), tiles, scaled), multiplier


def dequantize_blocks(
    values: Tensor, scale: Tensor, grid: Block, dtype: torch.dtype, *, multiply: bool = False
) -> Tensor:
    """values / scale of each element's block, or their product, in float32, rounded once to `dtype`."""
    tiles = _tiles(values.float(), grid)
    return _matrix(tiles * scale if multiply else tiles / scale, values.shape).to(dtype)


def _count_blocks(
    row: Tensor | None,
    block_row: Tensor | None,
    x: Tensor,
    tiles: Tensor,
    scaled: Tensor,
    rounded: Tensor | None,
    scale: Tensor,
    amax: Tensor,
    format: Format,
) -> None:
    """Count elements and blocks; `rounded`: q, if it does not follow from x*s."""
    # Masks are float32: torch's CPU compares into float32 and sums it several times faster than booleans.
    # Padding does not count as flushed, because it is zero in x too, nor as anything else.
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
    row[0] += x.numel()
    row[1] = torch.maximum(row[1], amax.max())
    row[2] = scale.median()
    row[3] += _total(saturated)
    row[6] += tiles.numel() - _total(finite)
    # Rounding to nearest even flushes up to half the smallest subnormal; see _count_small.
    half = format.smallest_subnormal / 2 if rounded is None else 0.0
    size = magnitude if rounded is None else rounded.abs()
    flushed = _total(torch.le(size, half, out=mask))
    below = _total(torch.lt(size, format.smallest_normal - half, out=mask))
    row[4] += flushed - _total(torch.eq(tiles, 0, out=mask))
    row[5] += below - flushed


def _total(mask: Tensor) -> Tensor:
    """The number of ones. Float32 is exact within a block; across blocks the sum needs float64."""
    return mask.sum((1, 3)).double().sum()


def _tiles(x: Tensor, grid: Block) -> Tensor:
    """[rows, columns] as [block rows, height, block columns, width], padded with zeros to whole blocks."""
    height, width = grid
    padded = functional.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % height))
    return padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)


def _matrix(tiles: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `_tiles`."""
    blocks_down, height, blocks_across, width = tiles.shape
    return tiles.reshape(blocks_down * height, blocks_across * width)[: shape[0], : shape[1]]
