"""Quantisation with one scale per tensor: the public functions, and the choice of the backend for each call.

There are two ways to store q: FP8 bytes (`quantize`), and the same numbers in bfloat16 (`quantize_values`).
A matrix product on hardware without FP8 units takes the latter.

On a GPU nothing here reads a value back, so that nothing waits. On a CPU reading a value is free: rare cases,
such as an Inf, cost time only where they occur.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8scope_kernels import backends, reference
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.formats import DATA_FORMATS, Format
from fp8scope_kernels.plain_tensors import can_branch_on, check_row, is_abstract, readable
from fp8scope_kernels.random_stream import Draw, RandomStream
from fp8scope_kernels.recipes import NONFINITE, Nonfinite
from fp8scope_kernels.reference import Extent, Stochastic
from fp8scope_kernels.statistics import STATISTICS
from fp8scope_kernels.triton import backend as triton_backend


class Fp8Tensor(NamedTuple):
    """A quantised tensor. It represents `data * inverse_scale`.

    `data`: the format's dtype, shape of the original. `inverse_scale`: float32, no dimensions.
    """

    data: Tensor
    inverse_scale: Tensor
    format: Format

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`data * inverse_scale`, computed in float32 and rounded once to `dtype`."""
        return (self.data.float() * self.inverse_scale).to(dtype)


def measure(x: Tensor) -> Extent:
    """Amax and number of non-finite elements of x (any floating dtype and shape).

    Raises TypeError if x is not floating point, or has no memory that can be read: sharded, nested and sparse
    tensors. A tensor without numbers (on the meta device, under FakeTensorMode) has an extent without them.
    """
    if torch.compiler.is_compiling():
        return Extent(*torch.ops.fp8scope.measure(x.detach()))
    return measure_now(x)


def measure_now(x: Tensor) -> Extent:
    """`measure` on the chosen backend; compiled code calls it through its custom operator."""
    x = _floating(x)
    if is_abstract(x):
        return Extent(x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float64))
    if x.numel() == 0:
        return Extent(*torch.zeros(2, dtype=torch.float32, device=x.device))
    if backends.use_triton(x, "measure"):
        measured = backends.attempt_triton("measure", lambda: triton_backend.measure(x))
        if measured is not None:
            return Extent(*measured)
    if backends.use_compiled(x):
        return _measure_compiled(x)
    return reference.measure(x)


def _measure_compiled(x: Tensor) -> Extent:
    amax, nonfinite = cpu_backend.measure(x), 0
    if not amax < torch.inf:
        amax, _, nonfinite = cpu_backend.inspect(x, 1.0, torch.inf)
    return _extent(amax, nonfinite)


def tensor_to_amax(x: Tensor) -> Tensor:
    """Max of abs(x) over the finite elements, 0 if there are none: float32, no dimensions."""
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
    return reference.amax_to_scale(amax, top, power_of_two, otherwise)


def to_fp8_saturated(scaled: Tensor, format: Format) -> Tensor:
    """Clamp float32 `scaled` to [-M, M], then round to nearest even: the format's dtype.

    NaN stays NaN. Inf becomes M with its sign: unlike `quantize`, this function cannot tell an Inf element
    from a product that has overflowed. Raises ValueError for a format without a torch dtype.
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
    `row`: float64 [len(STATISTICS)], see `StatisticsBuffer`. `extent`: the result of `measure(x)`, if known.
    `nonfinite`: whether Inf becomes NaN (`propagate`) or M (`clamp`), with its sign; NaN stays NaN.
    `saturate`: False does not clamp. What rounds to more than M then becomes NaN in E4M3 and Inf in E5M2, as
    in the non-saturating conversion of the OCP 8-bit floating point specification; torch's plain cast does
    either, depending on its version. Formats with neither NaN nor Inf saturate all the same.
    `stochastic`: round at random, see `round_stochastically`; not in compiled code, and only with `saturate`.
    With a `RandomStream`, every backend computes the same bits. With a generator of torch it is eager torch.

    Raises TypeError as `measure` does, and for a `row` that is not a plain tensor; ValueError for a `scale`
    or a `row` of another shape, a `row` on another device, a format of more than 8 bits or without a torch
    dtype, and an unknown `nonfinite`.
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
    """As `quantize`, but returns q as bfloat16, which holds every FP8 value exactly; any format."""
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
    if not torch.compiler.is_compiling():
        check_arguments(x, scale, format, row)
    if stochastic is not False:
        return _quantize_stochastically(dtype, x, scale, format, row, saturate, extent, stochastic, nonfinite)
    if not torch.compiler.is_compiling():
        return quantize_now(dtype, x, scale, format, row, saturate, extent, nonfinite)
    extent = extent or measure(x)
    if DATA_FORMATS.get(format.name) != format:
        raise ValueError(f"Compiled code supports the formats {', '.join(DATA_FORMATS)}, not {format}.")
    clamp = nonfinite == "clamp"
    # As in eager code, q has no gradient.
    x, scale, row = x.detach(), scale.detach(), None if row is None else row.detach()
    q: Tensor = torch.ops.fp8scope.quantize(x, scale, format.name, dtype, row, saturate, *extent, clamp)
    return q


def check_arguments(x: Tensor, scale: Tensor, format: Format, row: Tensor | None) -> None:
    """Check what the kernels of `quantize` rely on. Raises as `quantize` says."""
    if not isinstance(x, Tensor):
        raise TypeError(f"Only tensors can be quantised, got {type(x).__name__}.")
    if not isinstance(scale, Tensor):
        raise TypeError(f"scale must be a tensor without dimensions, got {type(scale).__name__}.")
    if scale.numel() != 1:
        raise ValueError(f"scale must be one number, got shape {tuple(scale.shape)}.")
    if scale.is_complex():
        raise TypeError(f"scale must be a real number, got {scale.dtype}.")
    if is_abstract(scale) and not is_abstract(x):
        raise TypeError(f"scale has no value: it is on {scale.device}, or made under FakeTensorMode.")
    check_format(format)
    check_row(row, x, len(STATISTICS), "row")


def check_format(format: Format) -> None:
    """Raise ValueError for a format that the kernels cannot quantise to."""
    if format.bits > 8 or not format.signed:
        raise ValueError(f"{format.name} is not a format for data of at most 8 bits.")


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
        raise ValueError("Stochastic rounding is not supported in compiled code; call it in eager code.")
    if not saturate:
        raise ValueError("Stochastic rounding needs saturate=True: there is no value above M to round to.")
    x = _floating(x)
    if is_abstract(x):
        return x.new_empty(x.shape, dtype=dtype)
    if isinstance(stochastic, RandomStream):
        stochastic = stochastic.draw()
    if isinstance(stochastic, Draw):
        drawn = _quantize_with_words(dtype, x, scale, format, row, extent, stochastic, nonfinite)
        if drawn is not None:
            return drawn
    q, counts = reference.quantize_stochastically(
        x, scale, format, stochastic, nonfinite == "propagate", row is not None
    )
    if row is not None and counts is not None:
        _accumulate(row, x.numel(), scale, extent or measure_now(x), counts)
    return q.to(dtype)


def _quantize_with_words(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    extent: Extent | None,
    draw: Draw,
    nonfinite: Nonfinite,
) -> Tensor | None:
    """q rounded at random by Triton or the compiled kernels; None where neither takes the tensor."""
    if backends.use_triton(x, "quantize_at_random"):
        passed = backends.attempt_triton(
            "quantize_at_random",
            lambda: triton_backend.quantize_at_random(
                dtype, x, scale, format, draw, row, extent=extent, nonfinite=nonfinite
            ),
        )
        if passed is not None:
            return passed.data
    if backends.use_compiled(x):
        bounds = _known_bounds(extent, row)
        return cpu_backend.quantize(
            x, scale.item(), format, dtype, row, bounds, nonfinite=nonfinite, draw=draw
        ).data
    return None


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
    """`quantize` to `dtype` on the chosen backend; compiled code calls it through its custom operator."""
    x = _floating(x)
    if is_abstract(x):
        return x.new_empty(x.shape, dtype=dtype)
    if backends.use_triton(x, "quantize"):
        passed = backends.attempt_triton(
            "quantize",
            lambda: triton_backend.quantize(
                dtype, x, scale, format, row, saturate=saturate, extent=extent, nonfinite=nonfinite
            ),
        )
        if passed is not None:
            return passed.data
    if saturate and backends.use_compiled(x):
        return _quantize_compiled(dtype, x, scale, format, row, extent, nonfinite)
    extent = extent or measure_now(x)
    # Multiplication by s is monotonic in float32 too: amax*s is the largest abs(x*s).
    finite = can_branch_on(x) and bool(extent.nonfinite == 0)
    inside = finite and bool(extent.amax * scale <= format.max)
    counts = None if row is None else torch.zeros(3, dtype=torch.float64, device=x.device)
    propagate = nonfinite == "propagate" and not finite
    out = reference.quantize(dtype, x, scale, format, counts, saturate, inside, propagate)
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
    """q; if the row needs an unknown extent, the same pass measures it."""
    bounds = _known_bounds(extent, row)
    return cpu_backend.quantize(x, scale.item(), format, dtype, row, bounds, nonfinite=nonfinite).data


def _known_bounds(extent: Extent | None, row: Tensor | None) -> tuple[float, int] | None:
    """Amax, and the number of non-finite elements if a row needs it."""
    if extent is None:
        return None
    return extent.amax.item(), int(extent.nonfinite) if row is not None else 0


def quantize_and_measure(
    dtype: torch.dtype,
    x: Tensor,
    scale: Tensor,
    format: Format,
    row: Tensor | None,
    nonfinite: Nonfinite = "propagate",
) -> tuple[Tensor, Extent]:
    """q in `dtype` and x's extent from one pass of the compiled backend over x; see `quantize`."""
    quantized = cpu_backend.quantize(
        _floating(x), scale.item(), format, dtype, row, measure=True, nonfinite=nonfinite
    )
    return quantized.data, _extent(quantized.amax, quantized.nonfinite)


def _extent(amax: float, nonfinite: int) -> Extent:
    # The explicit dtype and device keep torch's defaults out.
    return Extent(
        torch.tensor(amax, dtype=torch.float32, device="cpu"),
        torch.tensor(nonfinite, dtype=torch.float64, device="cpu"),
    )


def _accumulate(row: Tensor, elements: int, scale: Tensor, extent: Extent, counts: Tensor) -> None:
    # Without a gradient of its own, whatever was passed.
    numel, amax, used, counters, nonfinite = row.detach().tensor_split((1, 2, 3, 6))
    numel += elements
    torch.maximum(amax, extent.amax, out=amax)
    used.copy_(scale)
    counters += counts
    nonfinite += extent.nonfinite


def _floating(x: object) -> Tensor:
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"Only floating-point tensors can be quantised, got {kind}.")
    x = readable(x)
    # torch computes little with FP8 numbers.
    return x.float() if x.dtype == torch.float64 or x.dtype.itemsize == 1 else x


def _dtype(format: Format) -> torch.dtype:
    if format.dtype is None:
        raise ValueError(f"torch has no dtype for {format.name}; use quantize_values instead.")
    return format.dtype
