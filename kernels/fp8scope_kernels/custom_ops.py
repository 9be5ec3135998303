"""Quantisation as custom operators, `torch.ops.fp8scope.*`, for code that torch.compile traces.

A custom operator is one opaque node of the graph. The graph does not break where eager code reads a value,
and the compiler knows the shape of the output and that the statistics row is written. Eager code calls the
functions directly, without torch's dispatcher.
"""

import torch
from torch import Tensor

from fp8scope_kernels.formats import DATA_FORMATS
from fp8scope_kernels.graph_objects import fake_of, operator
from fp8scope_kernels.quantization import check_arguments, measure_now, quantize_now
from fp8scope_kernels.reference import Extent


@operator("measure")
def measure_op(x: Tensor) -> tuple[Tensor, Tensor]:
    """`measure`: amax (float32) and the number of non-finite elements (float64), both without dimensions."""
    amax, nonfinite = measure_now(x)
    return amax, nonfinite.double()


@fake_of("measure")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float64)


@operator("quantize", mutates_args=("row",))
def quantize_op(
    x: Tensor,
    scale: Tensor,
    format: str,
    dtype: torch.dtype,
    row: Tensor | None,
    saturate: bool,
    amax: Tensor,
    nonfinite: Tensor,
    clamp: bool = False,
) -> Tensor:
    """`quantize` and `quantize_values`: q in `dtype`, shape of x, with statistics added to `row`.

    `amax` and `nonfinite` are the result of `measure`. `clamp`: Inf becomes M, not NaN.
    """
    extent, to = Extent(amax, nonfinite), DATA_FORMATS[format]
    check_arguments(x, scale, to, row)
    return quantize_now(dtype, x, scale, to, row, saturate, extent, "clamp" if clamp else "propagate")


@fake_of("quantize")
def _(
    x: Tensor,
    scale: Tensor,
    format: str,
    dtype: torch.dtype,
    row: Tensor | None,
    saturate: bool,
    amax: Tensor,
    nonfinite: Tensor,
    clamp: bool = False,
) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)
