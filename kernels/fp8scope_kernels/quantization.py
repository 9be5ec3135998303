"""Quantisation in eager torch: the definition that every other backend is measured against.

The way of a tensor: `measure` (amax, non-finite elements) -> `amax_to_scale` -> multiply -> clamp -> round to
the format -> count. Rounding is to nearest, ties to even, as in torch's own cast.

Two ways to store q: as FP8 bytes (`quantize`), and as the same numbers in bfloat16 (`quantize_values`), which
is what a matrix product takes where the hardware has no FP8. The latter rounds in float32 arithmetic, because
on a CPU that is several times faster than casting to FP8 and back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels import backends
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.formats import DATA_FORMATS, Format
from fp8scope_kernels.recipes import NONFINITE, Nonfinite
from fp8scope_kernels.reference import (
    EXPONENT_BITS,
    Stochastic,
    count,
    infinite_to_nan_,
    quantize_eagerly,
    round_stochastically,
)
from fp8scope_kernels.triton import availability as triton_availability
from fp8scope_kernels.triton import backend as triton_backend

MAX_SCALE = torch.finfo(torch.float32).max
MIN_SCALE = torch.finfo(torch.float32).tiny


class Fp8Tensor(NamedTuple):
    """A quantised tensor, standing for `data * inverse_scale`.

    `data`: the format's dtype, shape of the original. `inverse_scale`: float32, no dimensions.
    """

    data: Tensor
    inverse_scale: Tensor
    format: Format

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`data * inverse_scale`, computed in float32 and rounded once to `dtype`."""
        return (self.data.float() * self.inverse_scale).to(dtype)


class Extent(NamedTuple):
    """What a scale is chosen from: scalars on the tensor's device.

    `amax`: float32, max of abs(x) over the finite elements, 0 where there are none.
    `nonfinite`: float32 or float64, how many elements are NaN or Inf.
    """

    amax: Tensor
    nonfinite: Tensor


def measure(x: Tensor) -> Extent:
    """Amax and number of non-finite elements of x (any floating dtype and shape).

    On a GPU nothing is read back, so nothing waits. On a CPU looking at a value costs nothing, so that there
    the rare case is paid for only where it occurs; the same holds in `quantize`.
    """
    if torch.compiler.is_compiling():
        return Extent(*torch.ops.fp8scope.measure(x))
    return measure_now(x)


def measure_now(x: Tensor) -> Extent:
    """`measure` in eager torch; compiled code gets here through its operator."""
    x = _floating(x)
    if x.numel() == 0:
        return Extent(*torch.zeros(2, dtype=torch.float32, device=x.device))
    if triton_availability.wants(x):
        measured = triton_availability.attempt(lambda: triton_backend.measure(x))
        if measured is not None:
            return Extent(*measured)
    if backends.use_compiled(x):
        return _measure_compiled(x)
    if x.is_cpu:
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high).float()
        if amax < torch.inf:
            return Extent(amax, torch.zeros_like(amax))
    low, high = torch.aminmax(x.nan_to_num(0.0, 0.0, 0.0))
    return Extent(torch.maximum(-low, high).float(), (~torch.isfinite(x)).sum().double())


def _measure_compiled(x: Tensor) -> Extent:
    amax, nonfinite = cpu_backend.measure(x), 0
    if not amax < torch.inf:
        amax, _, nonfinite = cpu_backend.inspect(x, 1.0, torch.inf)
    return _extent(amax, nonfinite)


def tensor_to_amax(x: Tensor) -> Tensor:
    """Max of abs(x) over the finite elements, 0 where there are none: float32, no dimensions."""
    return measure(x).amax


def amax_to_scale(
    amax: Tensor,
    format: Format,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    otherwise: Tensor | float = 1.0,
) -> Tensor:
    """s = M * 2^-margin / amax in float32 (elementwise); `otherwise` where amax is 0 or not finite.

    A scale beyond float32 becomes the largest (or the smallest normal) float32. With `power_of_two`, s is
    rounded down to a power of two, so that multiplying by it is exact.
    """
    amax, top = amax.float(), format.max * 2.0**-margin
    single = not amax.dim() and not (isinstance(otherwise, Tensor) and otherwise.dim())
    if single and not torch.compiler.is_compiling() and backends.use_compiled(amax):
        return amax.new_full((), cpu_backend.choose_scale(amax.item(), top, power_of_two, float(otherwise)))
    # Not `number / tensor`, which torch computes as a reciprocal and a product: two roundings.
    scale = torch.full_like(amax, top).div_(amax)
    if power_of_two:
        # A float32 without its mantissa bits is the power of two at or below it.
        scale = (scale.clamp(MIN_SCALE, MAX_SCALE).view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    else:
        scale.clamp_(MIN_SCALE, MAX_SCALE)
    return torch.where((amax > 0) & (amax < torch.inf), scale, otherwise)


def to_fp8_saturated(scaled: Tensor, format: Format) -> Tensor:
    """Clamp float32 `scaled` to [-M, M], then round to nearest even: the format's dtype.

    NaN stays NaN; Inf becomes M with its sign: unlike `quantize`, this cannot tell an Inf element from one
    that only the scale takes there. Raises ValueError for a format that torch has no dtype for.
    """
    return scaled.clamp(-format.max, format.max).to(_dtype(format))


def quantize(
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None = None,
    *,
    saturate: bool = True,
    extent: Extent | None = None,
    stochastic: Stochastic = False,
    nonfinite: Nonfinite = "propagate",
) -> Fp8Tensor:
    """Quantise x with one scale; accumulate its statistics into `row` if given.

    `x`: any floating dtype and shape (float64 is rounded to float32 first). `scale`: float32, no dimensions.
    `row`: float64 [len(STATISTICS)], see `StatisticsBuffer`. `extent`: what `measure(x)` said, to save
    measuring again. NaN stays NaN. `nonfinite`: what Inf becomes, `propagate` NaN, `clamp` M; both with its
    sign. With `saturate` False nothing is clamped: what rounds to more than M becomes NaN in E4M3 and Inf in
    E5M2 (the non-saturating conversion of the OCP 8-bit floating point specification; torch's plain cast does
    either, depending on its version). Formats with neither saturate all the same. `stochastic` rounds at
    random, see `round_stochastically`: in eager torch on every backend, not in compiled code, and only with
    `saturate`.

    Raises TypeError if x is not floating point; ValueError for a format that torch has no dtype for, and for
    an unknown `nonfinite`.
    """
    data = _quantize(_dtype(format), x, scale, format, row, saturate, extent, stochastic, nonfinite)
    return Fp8Tensor(data, scale.reciprocal(), format)


def quantize_values(
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None = None,
    *,
    saturate: bool = True,
    extent: Extent | None = None,
    stochastic: Stochastic = False,
    nonfinite: Nonfinite = "propagate",
) -> Tensor:
    """As `quantize`, but q as bfloat16 values, which hold every FP8 value exactly; any format."""
    return _quantize(torch.bfloat16, x, scale, format, row, saturate, extent, stochastic, nonfinite)


def _quantize(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    saturate: bool,
    extent: Extent | None,
    stochastic: Stochastic,
    nonfinite: Nonfinite,
) -> Tensor:
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {', '.join(NONFINITE)}, got {nonfinite!r}.")
    if stochastic is not False:
        return _quantize_stochastically(dtype, x, scale, format, row, saturate, extent, stochastic, nonfinite)
    if not torch.compiler.is_compiling():
        return quantize_now(dtype, x, scale, format, row, saturate, extent, nonfinite)
    extent = extent or measure(x)
    if DATA_FORMATS.get(format.name) != format:
        raise ValueError(f"Compiled code knows the formats {', '.join(DATA_FORMATS)}, not {format}.")
    clamp = nonfinite == "clamp"
    q: Tensor = torch.ops.fp8scope.quantize(x, scale, format.name, dtype, row, saturate, *extent, clamp)
    return q


def _quantize_stochastically(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    saturate: bool,
    extent: Extent | None,
    stochastic: Stochastic,
    nonfinite: Nonfinite,
) -> Tensor:
    if torch.compiler.is_compiling():
        raise ValueError("Stochastic rounding is not registered for compiled code; call it in eager code.")
    if not saturate:
        raise ValueError("Stochastic rounding needs saturate=True: there is nothing to round to beyond M.")
    x = _floating(x)
    scaled = x.float() * scale
    clamped = scaled.clamp(-format.max, format.max)
    if nonfinite == "propagate":
        infinite_to_nan_(clamped, x)
    q = round_stochastically(clamped, format, stochastic)
    if row is not None:
        _accumulate(row, x.numel(), scale, extent or measure_now(x), count(x, scaled, q, format))
    return q.to(dtype)


def quantize_now(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    saturate: bool,
    extent: Extent | None,
    nonfinite: Nonfinite = "propagate",
) -> Tensor:
    """`quantize` to `dtype`, on the backend chosen; compiled code gets here through its operator."""
    x = _floating(x)
    if triton_availability.wants(x):
        passed = triton_availability.attempt(
            lambda: triton_backend.quantize(
                dtype, x, scale, format, row, saturate=saturate, extent=extent, nonfinite=nonfinite
            )
        )
        if passed is not None:
            return passed.data
    if saturate and backends.use_compiled(x):
        return _quantize_compiled(dtype, x, scale, format, row, extent, nonfinite)
    extent = extent or measure_now(x)
    # Multiplication by s is monotonic in float32 too: amax*s is the largest abs(x*s).
    inside = x.is_cpu and bool(extent.amax * scale <= format.max) and bool(extent.nonfinite == 0)
    counts = None if row is None else torch.zeros(3, dtype=torch.float64, device=x.device)
    # Where reading a value costs nothing, Inf is looked for only where one is.
    propagate = nonfinite == "propagate" and not (x.is_cpu and bool(extent.nonfinite == 0))
    out = quantize_eagerly(dtype, x, scale, format, counts, saturate, inside, propagate)
    if row is not None and counts is not None:
        _accumulate(row, x.numel(), scale, extent, counts)
    return out


def _quantize_compiled(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    extent: Extent | None,
    nonfinite: Nonfinite,
) -> Tensor:
    """q; what is not known of x yet is measured in the same pass, if the row needs it."""
    known = None if extent is None else (extent.amax.item(), int(extent.nonfinite) if row is not None else 0)
    return cpu_backend.quantize(x, scale.item(), format, dtype, row, known, nonfinite=nonfinite).data


def quantize_and_measure(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    nonfinite: Nonfinite = "propagate",
) -> tuple[Tensor, Extent]:
    """q in `dtype` and x's extent from one pass of the compiled backend over x; see `quantize`."""
    found = cpu_backend.quantize(
        _floating(x), scale.item(), format, dtype, row, measure=True, nonfinite=nonfinite
    )
    return found.data, _extent(found.amax, found.nonfinite)


def _extent(amax: float, nonfinite: int) -> Extent:
    # Neither may follow torch's default dtype, or device.
    return Extent(
        torch.tensor(amax, dtype=torch.float32, device="cpu"),
        torch.tensor(nonfinite, dtype=torch.float64, device="cpu"),
    )


def _accumulate(row: Tensor, elements: int, scale: Tensor, extent: Extent, counts: Tensor) -> None:
    numel, amax, used, counters, nonfinite = row.tensor_split((1, 2, 3, 6))
    numel += elements
    torch.maximum(amax, extent.amax, out=amax)
    used.copy_(scale)
    counters += counts
    nonfinite += extent.nonfinite


def _floating(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError(f"Only floating-point tensors can be quantised, got {x.dtype}.")
    x = x.detach()
    return x.float() if x.dtype == torch.float64 else x


def _dtype(format: Format) -> torch.dtype:
    if format.dtype is None:
        raise ValueError(f"torch has no dtype for {format.name}; use quantize_values instead.")
    return format.dtype
