"""Quantisation in plain torch: the definition that every backend is measured against.

Rounding is done in float32 arithmetic, so that it works for any format, also one without a torch dtype.
Large tensors are cast in chunks that stay in a CPU's cache.
"""

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from fp8scope_kernels.formats import Format

EXPONENT_BITS = 0x7F800000
"""The exponent field of a float32."""


def round_to_format(x: Tensor, format: Format) -> Tensor:
    """Round float32 x, abs(x) <= M, to the nearest value of the format, ties to even: float32. NaN stays NaN.

    Any format, also one without a torch dtype. The only difference from a cast and back is that a negative
    value that vanishes becomes +0.
    """
    return round_(x.clone(), torch.empty_like(x), format)


def round_(x: Tensor, room: Tensor, format: Format) -> Tensor:
    """`round_to_format` in place; `room` is overwritten.

    Adding and subtracting t = 1.5 * 2^(23-m) * p leaves multiples of p * 2^-m (float32's own rounding does
    the rest), where p is the power of two at or below abs(x), but not below the smallest normal, and m the
    format's mantissa bits.
    """
    torch.bitwise_and(x.view(torch.int32), EXPONENT_BITS, out=room.view(torch.int32))
    room.clamp_(min=format.smallest_normal).mul_(1.5 * 2.0 ** (23 - format.mantissa_bits))
    return x.add_(room).sub_(room)


def infinite_to_nan_(scaled: Tensor, x: Tensor) -> Tensor:
    """Make `scaled`, float32, NaN with the sign of x wherever x (any floating dtype, same shape) is Inf."""
    nan = torch.full_like(scaled, torch.nan).copysign_(x)
    return scaled.copy_(torch.where(torch.isinf(x), nan, scaled))


def round_unsaturated_(scaled: Tensor, room: Tensor, format: Format) -> None:
    """As `round_`, but what rounds to more than M becomes Inf, or NaN, or M: what the format has."""
    # What is not clamped still has to stay clear of float32's own limits while it is being rounded.
    round_(scaled.clamp_(-4 * format.max, 4 * format.max), room, format)
    beyond = torch.inf if format.has_infinity else torch.nan if format.has_nan else format.max
    scaled.masked_fill_(scaled > format.max, beyond).masked_fill_(scaled < -format.max, -beyond)


Stochastic = bool | torch.Generator
"""False: to nearest. True: at random, by torch's own generator of the device; or by this generator of it."""


def round_stochastically(x: Tensor, format: Format, stochastic: Stochastic = True) -> Tensor:
    """Round float32 x, abs(x) <= M, to one of the two values of the format next to it: float32.

    The value above is taken with probability (x - below) / (above - below), which one random number of 24
    bits decides per element: exact for normal numbers, off by less than 2^-24 for subnormal ones. What the
    format holds exactly is left alone; NaN stays NaN. The same generator state gives the same result.
    """
    power = (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32).clamp_(min=format.smallest_normal)
    step = power.mul_(2.0**-format.mantissa_bits)
    # Exact, as is everything but the comparison: steps are powers of two, at most 2^(m+1) of them below x.
    steps = x.abs().div_(step)
    below = steps.floor()
    generator = stochastic if isinstance(stochastic, torch.Generator) else None
    chance = torch.rand(x.shape, generator=generator, device=x.device)
    return (below + (chance < steps - below)).mul_(step).copysign_(x)


def count(x: Tensor, scaled: Tensor, q: Tensor, format: Format) -> Tensor:
    """[saturated, underflow, subnormal] of x, x*s before clamping, and the rounded value q: float64 [3]."""
    magnitude = q.abs()
    saturated = (scaled.abs() > format.limit) & torch.isfinite(x)
    underflow = (x != 0) & (magnitude == 0)
    subnormal = (magnitude > 0) & (magnitude < format.smallest_normal)
    return torch.stack([mask.sum() for mask in (saturated, underflow, subnormal)]).double()


CPU_CHUNK = 2**19
"""Elements worked on at a time on a CPU, so that what lies between two operations stays in its cache."""
DEVICE_CHUNK = 2**24
"""The same elsewhere: counts are sums of ones in float32, which are exact up to here."""


def quantize_eagerly(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    counts: Tensor | None,
    saturate: bool,
    inside: bool,
    propagate: bool,
) -> Tensor:
    """q, with [saturated, underflow, subnormal] added to `counts`.

    `inside`: nothing is beyond M, or not finite. `propagate`: Inf becomes NaN.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    for part, target in _chunks(x, out):
        scaled, room = _workspace(part)
        torch.mul(part, scale, out=scaled) if part.dtype == torch.float32 else scaled.copy_(part).mul_(scale)
        if counts is not None and not inside:
            counts[0] += _count_saturated(part, scaled, room, format)
        if propagate and not inside:
            infinite_to_nan_(scaled, part)
        if saturate and not inside:
            scaled.clamp_(-format.max, format.max)
        if not saturate:
            round_unsaturated_(scaled, room, format)
        elif dtype == torch.bfloat16:
            round_(scaled, room, format)
        target.copy_(scaled)
        if counts is not None:
            counts[1:] += _count_small(part, scaled, room, format)
    return out


def _count_saturated(x: Tensor, scaled: Tensor, room: Tensor, format: Format) -> Tensor:
    """Finite elements with abs(x*s) > limit. NaN compares false; Inf is above it and is taken out again."""
    above = torch.abs(scaled, out=room).gt_(format.limit).sum()
    # With a scale of 0 or NaN (torchao's, for a tensor with an Inf) no product is above anything.
    return (above - room.copy_(x).abs_().eq_(torch.inf).sum()).clamp_(min=0)


def _count_small(x: Tensor, q: Tensor, room: Tensor, format: Format) -> Tensor:
    """Underflowing and subnormal elements, float32 [2]; q, x*s before or after rounding, is overwritten.

    Rounding to nearest even flushes abs(x*s) <= half the smallest subnormal, and leaves a subnormal below
    the smallest normal less that half. Both hold for x*s and for its rounded value alike.
    """
    half = format.smallest_subnormal / 2
    q.abs_()
    # Compared into and summed as float32, because torch's CPU does that several times faster than booleans.
    flushed = torch.le(q, half, out=room).sum()
    small = torch.lt(q, format.smallest_normal - half, out=room).sum()
    zeros = torch.eq(x, 0, out=room).sum()
    return torch.stack((flushed - zeros, small - flushed))


def _chunks(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors, flattened, in pieces of the same elements; `out` is contiguous."""
    flat, target = x.reshape(-1), out.view(-1)
    size = CPU_CHUNK if x.is_cpu else DEVICE_CHUNK
    if flat.numel() <= size:
        yield flat, target
        return
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size], target[start : start + size]


_local = threading.local()


def _workspace(like: Tensor) -> tuple[Tensor, Tensor]:
    """Room for two float32 tensors of this size, its content undefined.

    Each CPU thread keeps its own: memory asked from the system anew each time costs more than the work in it.
    """
    size = like.numel()
    if not like.is_cpu:
        first, second = torch.empty(2, size, dtype=torch.float32, device=like.device)
        return first, second
    room: Tensor | None = getattr(_local, "room", None)
    if room is None or room.shape[1] < size:
        # What outlives a call is made outside of inference mode, whose tensors nobody may write to after it.
        with torch.inference_mode(False):
            room = _local.room = torch.empty(2, size, dtype=torch.float32, device="cpu")
    return room[0, :size], room[1, :size]
