"""Which tensors the kernels can read directly from memory, and in which order."""

import torch
from torch import Tensor, nn

from fp8scope_kernels.torch_internals import is_functorch_wrapped_tensor

PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
"""Types whose memory holds the numbers that they represent. A subclass may represent something else."""

READABLE_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}
"""The dtypes that the kernels observe, with their numbers in cpu/csrc/tensors.h."""


def has_plain_memory(x: Tensor) -> bool:
    """Whether kernels can read the numbers of x from its memory.

    They cannot for wrappers (of torch.func, or subclasses), sparse layouts and other dtypes.
    """
    return (
        type(x) in PLAIN_TYPES
        and x.dtype in READABLE_DTYPES
        and x.layout is torch.strided
        and not is_functorch_wrapped_tensor(x)
    )


def in_memory_order(x: Tensor) -> tuple[Tensor, int]:
    """The elements of x in a contiguous tensor, and how often x repeats each of them (expanded dimensions).

    The elements are in the order of the memory, so that a transposed tensor is not copied.
    """
    x, repeat = x.detach(), 1
    for dim in reversed(range(x.dim())):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            repeat *= x.shape[dim]
            x = x.select(dim, 0)
    strides = x.stride()
    return x.permute(sorted(range(x.dim()), key=lambda dim: -strides[dim])).contiguous(), repeat
