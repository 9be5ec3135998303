"""The bytes that a training holds from step to step, by what they are for.

The account is exact: the sizes of the tensors that exist on this rank. What comes and goes within a step
(activations, casts of weights and their transposes, temporaries) is the rest of the allocator's peak, from
which the server subtracts it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.observe.tensors.base import local
from fp8scope_kernels import fp8_experts, fp8_layers

MAX_KEYS = 16
"""The most kinds of tensors of an optimizer's state; the rest count as `others`."""


def memory_account(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return the bytes of weights, gradients, optimizer state, FP8 scaling state and other buffers.

    Weights, gradients and each tensor of the optimizer state are divided by dtype. A parameter that has no
    gradient at the moment, but requires one, counts as one of its own size. What two models share counts
    once.
    """
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    scaling: set[int] = set()
    for model in models:
        parameters |= {id(parameter): parameter for parameter in model.parameters()}
        buffers |= {id(buffer): buffer for buffer in model.buffers()}
        for _, layer in fp8_layers(model):
            scaling |= {id(buffer) for buffer in layer.scaling.buffers()}
        for _, products in fp8_experts(model):
            scaling |= {id(buffer) for buffer in products.buffers()}
    weights: dict[str, int] = {}
    gradients: dict[str, int] = {}
    for parameter in parameters.values():
        _add(weights, parameter)
        if parameter.requires_grad:
            _add(gradients, parameter if parameter.grad is None else parameter.grad)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer_account(optimizers),
        "scaling": sum(bytes_of(buffer) for key, buffer in buffers.items() if key in scaling),
        "buffers": sum(bytes_of(buffer) for key, buffer in buffers.items() if key not in scaling),
    }


def optimizer_account(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, dict[str, int]]:
    """Return the bytes of the optimizers' state by the name of its tensors (exp_avg, master) and dtype."""
    account: dict[str, dict[str, int]] = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    key = str(name) if str(name) in account or len(account) < MAX_KEYS else "others"
                    _add(account.setdefault(key, {}), value)
    return account


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of this rank's part of a tensor, with those of the tensors that a subclass wraps."""
    part = local(tensor)
    flatten = getattr(part, "__tensor_flatten__", None)
    if flatten is None:
        return part.nbytes
    return sum(bytes_of(getattr(part, name)) for name in flatten()[0])


def _add(account: dict[str, int], tensor: Tensor) -> None:
    name = dtype_of(tensor)
    account[name] = account.get(name, 0) + bytes_of(tensor)


def dtype_of(tensor: Tensor) -> str:
    """Return the dtype of the stored elements: of a subclass, that of the largest tensor that it wraps."""
    part = local(tensor)
    flatten = getattr(part, "__tensor_flatten__", None)
    if flatten is not None and (inner := [getattr(part, name) for name in flatten()[0]]):
        return dtype_of(max(inner, key=bytes_of))
    return str(part.dtype).removeprefix("torch.")
