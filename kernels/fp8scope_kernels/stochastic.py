"""Stochastic rounding: up or down at random, so that the expected value is the value itself.

Rounding to nearest loses what is small against the distance between two values of the format, always to the
same side; stochastic rounding keeps it on average (Gupta et al., "Deep Learning with Limited Numerical
Precision", 2015), at the price of more noise in each single value.
"""

import torch
from torch import Tensor

from fp8scope_kernels.formats import Format
from fp8scope_kernels.rounding import EXPONENT_BITS

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
