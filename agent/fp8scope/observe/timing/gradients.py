"""The gradient norm and the learning rates of an optimizer's step. Nothing here waits for a device."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8scope_kernels import backends
from fp8scope_kernels.cpu import backend as cpu_backend

if TYPE_CHECKING:
    from torch.optim import Optimizer

MAX_GROUPS = 32
"""Parameter groups whose learning rate is recorded."""


def inner_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside the wrappers of Accelerate or Lightning (`.optimizer`)."""
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def gradient_norm(optimizer: "Optimizer") -> tuple[Tensor | float, bool] | None:
    """Return the global L2 norm of the gradients that `optimizer` is about to use.

    The square root of the sum of all elements' squares, in float32 or wider. Gradients that a GradScaler
    left scaled (fused optimizers unscale as they go) count unscaled. The second value says whether
    gradients are sharded, and the norm then that of this rank's shards only. None without gradients, or with
    sparse ones, whose norm would need a wait.
    """
    gradients = [
        gradient
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (gradient := parameter.grad) is not None
    ]
    if not gradients:
        return None
    if _can_read(gradients):
        return _unscaled(cpu_backend.norm(gradients), optimizer), False
    return _norm_of_any(gradients, optimizer)


@torch.no_grad()
def _norm_of_any(gradients: list[Tensor], optimizer: "Optimizer") -> tuple[Tensor | float, bool] | None:
    """`gradient_norm` for several devices or dtypes, and for sharded gradients."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sharded = False
    for gradient in gradients:
        if gradient.layout != torch.strided:
            return None
        if type(gradient) is not Tensor and hasattr(gradient, "to_local"):
            gradient, sharded = gradient.to_local(), True
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms = [_norm(dtype, alike) for (_, dtype), alike in by_kind.items()]
    device = norms[0].device
    total = norms[0].float()
    if len(norms) > 1:
        alike = [norm.to(device, torch.float32, non_blocking=True) for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(alike))
    return _unscaled(total, optimizer), sharded


def _unscaled(total: Tensor | float, optimizer: "Optimizer") -> Tensor | float:
    scale = getattr(optimizer, "grad_scale", None)
    if not isinstance(scale, Tensor):
        return total
    device = total.device if isinstance(total, Tensor) else scale.device
    return total / scale.to(device, non_blocking=True)


def _norm(dtype: torch.dtype, gradients: list[Tensor]) -> Tensor:
    """Return the norm of tensors that share a device and this dtype, in few kernel launches."""
    # Sum in float32: squares of float16 values overflow float16.
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)))
    return norm


def _can_read(gradients: list[Tensor]) -> bool:
    """Return whether one call of the CPU kernels can read all of these."""
    if not backends.use_compiled(gradients[0]):
        return False
    # A loop is faster than a generator: this checks every gradient in every step.
    for gradient in gradients:
        if not (
            type(gradient) is Tensor
            and gradient.dtype is torch.float32
            and gradient.is_cpu
            and gradient.layout is torch.strided
        ):
            return False
    return True


def learning_rates(optimizer: "Optimizer", offset: int = 0) -> dict[str, Any]:
    """`learning_rate` of the first group and `learning_rate/groupN` of those after it; numbers or tensors.

    `offset` is the number of groups of the optimizers before this one.
    """
    rates: dict[str, Any] = {}
    for index, group in enumerate(optimizer.param_groups, offset):
        if index >= MAX_GROUPS:
            break
        rate = group.get("lr")
        if rate is not None:
            rates["learning_rate" if index == 0 else f"learning_rate/group{index}"] = rate
    return rates


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a step with these arguments has a closure that computes the gradients."""
    return callable(kwargs.get("closure")) or any(callable(argument) for argument in args[1:])
