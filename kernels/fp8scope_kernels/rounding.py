"""Rounding to a format in float32 arithmetic, for any format, also one without a torch dtype."""

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
