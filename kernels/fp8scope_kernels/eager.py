"""The cast of a tensor in eager torch, with its counters: chunk by chunk, in memory that is used again."""

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from fp8scope_kernels.formats import Format
from fp8scope_kernels.rounding import infinite_to_nan_, round_, round_unsaturated_

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
