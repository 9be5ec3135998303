"""The tensors that the kernels read directly from memory, their order, and the copies of the others.

Kernels get addresses, so that a tensor without memory of its own would end the process. Every tensor from
outside passes `readable` or `check_row` first. Compiled and Triton kernels take what `is_plain` accepts; the
rest is computed in eager torch, or refused with an exception that says what to pass instead.
"""

import torch
from torch import Tensor, nn

from fp8scope_kernels.torch_internals import (
    is_dynamo_compiling,
    is_fake,
    is_functional,
    is_functorch_wrapped_tensor,
)

PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
"""Types whose memory holds the numbers that they represent. A subclass may represent something else."""

READABLE_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}
"""The dtypes that the kernels observe, with their numbers in cpu/csrc/tensors.h."""


def is_plain(x: Tensor) -> bool:
    """Return whether x is dense, and neither a wrapper of torch.func nor a subclass."""
    return type(x) in PLAIN_TYPES and x.layout is torch.strided and not x.is_nested and not _is_wrapper(x)


def has_plain_memory(x: Tensor) -> bool:
    """Return whether the observers' kernels can read the numbers of x from its memory.

    They cannot for wrappers (of torch.func, or subclasses), sparse layouts and other dtypes.
    """
    return (
        type(x) in PLAIN_TYPES
        and x.dtype in READABLE_DTYPES
        and x.layout is torch.strided
        and not _is_wrapper(x)
    )


def _is_wrapper(x: Tensor) -> bool:
    """Return whether torch has wrapped another tensor in x, which has the type Tensor."""
    return is_functorch_wrapped_tensor(x) or is_functional(x)


def is_dtensor(x: object) -> bool:
    """Return whether x is a DTensor, or another tensor that has a local part."""
    if type(x) in PLAIN_TYPES:
        return False
    if is_dynamo_compiling():
        # The attributes of a tensor in a graph do not say.
        from torch.distributed.tensor import DTensor

        return isinstance(x, DTensor)
    return hasattr(x, "to_local")


def is_abstract(x: Tensor) -> bool:
    """Return whether x has a shape but no numbers: on the meta device, or under FakeTensorMode."""
    return x.is_meta or (type(x) not in PLAIN_TYPES and is_fake(x))


def can_branch_on(x: Tensor) -> bool:
    """Return whether Python may test values computed from x.

    Free on a CPU, a wait on a device, else impossible.
    """
    return x.is_cpu and is_plain(x)


def readable(x: Tensor) -> Tensor:
    """x, detached, with its numbers in memory as they are: without a pending negation or communication.

    Raises TypeError for sharded, nested, sparse and other tensors that are not dense, and RuntimeError if the
    memory has been freed. Other subclasses come back as they are, for eager torch.
    """
    if not is_plain(x):
        x = _unwrapped(x)
    if x.is_neg():
        x = x.resolve_neg()
    check_memory(x)
    return x.detach()


def _unwrapped(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"Only tensors can be quantised, got {type(x).__name__}.")
    if hasattr(x, "to_local"):
        raise TypeError(
            f"A {type(x).__name__} has no memory of its own: pass this rank's part, x.to_local(), or the "
            "whole tensor, x.full_tensor()."
        )
    if x.is_nested:
        raise TypeError("A nested tensor cannot be quantised: pass a padded one, x.to_padded_tensor(0.0).")
    if x.layout is not torch.strided:
        raise TypeError(f"Only dense tensors can be quantised, got layout {x.layout}: pass x.to_dense().")
    # The result of a functional collective, which may still be under way.
    wait = getattr(x, "trigger_wait", None)
    return wait() if callable(wait) else x


def check_memory(x: Tensor) -> None:
    """Raise RuntimeError if memory of x has been freed, as FSDP does between two uses of a weight."""
    if type(x) not in PLAIN_TYPES or _is_wrapper(x) or not x.numel():
        return
    elements = x.numel()
    if not x.is_contiguous():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if (x.storage_offset() + elements) * x.element_size() > x.untyped_storage().nbytes():
        raise RuntimeError(f"The memory of a tensor of shape {tuple(x.shape)} has been freed.")


def check_row(row: object, x: Tensor, size: int, name: str) -> None:
    """Check that kernels can add to `row` what they count in x: a floating tensor [size] on x's device.

    Raises TypeError or ValueError, which says what is wrong with `name`.
    """
    if row is None:
        return
    if not (isinstance(row, Tensor) and row.is_floating_point()):
        raise TypeError(f"{name} must be a float64 tensor [{size}], got {_kind(row)}.")
    if row.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {tuple(row.shape)}.")
    if row.device != x.device:
        raise ValueError(
            f"{name} is on {row.device} and its tensor on {x.device}: make the StatisticsBuffer with "
            f"device={str(x.device)!r}."
        )
    if is_abstract(row) != is_abstract(x) or (not is_abstract(row) and (not is_plain(row) or row.is_neg())):
        raise TypeError(f"{name} must be a plain tensor, because kernels write to it, got {_kind(row)}.")
    check_memory(row)


def _kind(x: object) -> str:
    return f"{type(x).__name__} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


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
