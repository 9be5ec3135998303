"""Samples: quantisation error and the distribution of exponents, too expensive for every step.

`fp8scope_kernels.statistics` defines the entries of a sample.
"""

import torch
from torch import Tensor

from fp8scope_kernels import backends
from fp8scope_kernels.cpu import backend as cpu_backend
from fp8scope_kernels.plain_tensors import can_branch_on, check_row, is_abstract, is_plain, readable
from fp8scope_kernels.statistics import EXPONENT_BINS, MIN_EXPONENT, SAMPLE_SIZE, exponent_bin

CPU_PART, DEVICE_PART = 2**15, 2**22
"""Elements sampled at a time: on a CPU as many as fit into its cache."""
COMPILED_PART = 2**20
"""The same for the compiled backend, which does its own blocking. FP8 values are copied to bfloat16."""

FLOAT32_MANTISSA, FLOAT32_BIAS = 23, 127


def exponent_histogram(x: Tensor) -> Tensor:
    """Return how many elements of x (any floating dtype and shape) have each exponent: float64
    [EXPONENT_BINS].

    Raises TypeError as `measure` does.
    """
    x = readable(x)
    if not is_abstract(x) and x.numel() and backends.use_compiled(x):
        # An explicit device keeps torch's default out.
        bins = torch.zeros(EXPONENT_BINS, dtype=torch.float64, device="cpu")
        cpu_backend.exponents(x, bins)
        return bins
    wide = x.reshape(-1).float()
    return _histogram_on_cpu(wide) if can_branch_on(wide) else _histogram(wide)


def _histogram(wide: Tensor) -> Tensor:
    # frexp's exponent belongs to a mantissa in [1/2, 1): it is floor(log2) + 1, and bin 0 is for zeros.
    index = torch.frexp(wide).exponent.long() - MIN_EXPONENT
    index.masked_fill_(wide == 0, 0).masked_fill_(~torch.isfinite(wide), EXPONENT_BINS - 1)
    bins = torch.zeros(EXPONENT_BINS, dtype=torch.float64, device=wide.device)
    return bins.index_add_(0, index, torch.ones_like(index, dtype=torch.float64))


def _histogram_on_cpu(wide: Tensor) -> Tensor:
    """The same, faster: count float32's exponent fields, and only the subnormals by `_histogram`."""
    biased = (wide.view(torch.int32) >> FLOAT32_MANTISSA) & 0xFF
    counts = torch.bincount(biased, minlength=256)
    # Reading counts[0] would wait on a device; here it is free. An explicit device keeps torch's default out.
    none = torch.zeros(EXPONENT_BINS, dtype=torch.float64, device="cpu")
    small = _histogram(wide[biased == 0]) if counts[0] else none
    small[exponent_bin(1 - FLOAT32_BIAS) : -1] += counts[1:255]
    small[-1] += counts[255]
    return small


def accumulate_sample(sample: Tensor, x: Tensor, values: Tensor, inverse_scale: Tensor) -> None:
    """Add one call to a sample, float64 [SAMPLE_SIZE].

    `values` are the quantised numbers q; `inverse_scale` is 1/s and broadcasts over them. Their product is
    compared with x in float64, part by part, so that a large tensor needs no large copies.

    Raises ValueError if `values` has another shape than x, if `inverse_scale` does not broadcast, or if they
    or `sample` are on another device or `sample` has another shape; TypeError as `measure` does.
    """
    check_row(sample, x, SAMPLE_SIZE, "sample")
    x, values, inverse_scale = readable(x), readable(values), readable(inverse_scale)
    _check_sampled(x, values, inverse_scale)
    if is_abstract(x):
        return
    if x.dim() == 0:
        x, values = x.reshape(1), values.reshape(1)
    compiled = _is_for_compiled(x, values, inverse_scale)
    size = COMPILED_PART if compiled else CPU_PART if x.is_cpu else DEVICE_PART
    rows = max(1, size * x.shape[0] // max(x.numel(), 1))
    if not compiled:
        inverse_scale = inverse_scale.double().broadcast_to(x.shape)
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        scales = inverse_scale if inverse_scale.numel() == 1 else inverse_scale[part]
        take = cpu_backend.accumulate_sample if compiled else _accumulate
        take(sample, x[part], values[part], scales)


def _check_sampled(x: Tensor, values: Tensor, inverse_scale: Tensor) -> None:
    if values.shape != x.shape:
        raise ValueError(f"values have shape {tuple(values.shape)}, and x has {tuple(x.shape)}.")
    if values.device != x.device or inverse_scale.device != x.device:
        raise ValueError(f"values, inverse_scale and x must be on one device, here {x.device}.")
    sizes = zip(reversed(inverse_scale.shape), reversed(x.shape), strict=False)
    single = inverse_scale.numel() == 1
    if not single and (inverse_scale.dim() > x.dim() or any(own not in (1, size) for own, size in sizes)):
        raise ValueError(
            f"An inverse_scale of shape {tuple(inverse_scale.shape)} does not broadcast to {tuple(x.shape)}."
        )


def _is_for_compiled(x: Tensor, values: Tensor, inverse_scale: Tensor) -> bool:
    """Return whether the compiled backend takes the sample.

    It reads FP8 values, as bytes or as bfloat16, with one scale for all or one for each row.
    """
    exact = values.dtype is torch.bfloat16 or (values.dtype.itemsize == 1 and values.is_floating_point())
    by_row = inverse_scale.numel() == 1 or inverse_scale.shape == (len(x), *(1 for _ in x.shape[1:]))
    is_supported = x.dtype in (torch.bfloat16, torch.float32) and inverse_scale.dtype is torch.float32
    plain = is_plain(values) and is_plain(inverse_scale)
    return exact and by_row and is_supported and plain and x.numel() > 0 and backends.use_compiled(x)


def _accumulate(sample: Tensor, x: Tensor, values: Tensor, inverse_scale: Tensor) -> None:
    wide = x.double().reshape(-1)
    error = (values.double() * inverse_scale).reshape(-1).sub_(wide)
    squares = torch.stack((torch.dot(error, error), torch.dot(wide, wide)))
    if not (can_branch_on(x) and bool(squares.isfinite().all())):
        finite = torch.isfinite(error)
        squares[0] = torch.where(finite, error, 0.0).square().sum()
        squares[1] = torch.where(finite, wide, 0.0).square().sum()
    sample[:2] += squares
    sample[2:] += exponent_histogram(x)
