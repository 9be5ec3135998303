"""Measured costs of layers and stages: time of a micro-batch, bytes that stay, bytes for backward."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fp8scope.planning.pipeline_split import LayerCost
from fp8scope_kernels import devices

ADAM_BYTES = 8
"""Bytes of optimizer state for each parameter: two moments in float32."""


def measure(
    layers: Sequence[nn.Module],
    batch: Tensor,
    *,
    repeats: int = 5,
    optimizer_bytes: float = ADAM_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> list[LayerCost]:
    """The cost of each layer, from passes of it alone: the output of one is the input of the next.

    `batch`: a micro-batch as the first layer takes it. `seconds` are the median of `repeats` forward and
    backward passes by `clock`; an accelerator is waited for. `weights`: parameters, their gradients in the
    same dtype, and `optimizer_bytes` for each parameter that is trained. `activations`: the memory that
    autograd keeps for the backward pass, without parameters, each storage once. Gradients of the layers are
    left as they were.
    """
    costs = []
    x = batch.detach()
    for number, layer in enumerate(layers):
        x, cost = _measure_one(layer, x, repeats, optimizer_bytes, clock)
        costs.append(replace(cost, name=str(number)))
    return costs


def stage_scalars(stage: int, seconds: float, memory: float) -> dict[str, float]:
    """The time and memory of a stage as scalars of a run: pass them to `step.log` or `run.log` on its rank.

    `seconds`: of one micro-batch, forward and backward. `memory`: the stage's most bytes in the step.
    """
    return {f"stage_{stage}_seconds": seconds, f"stage_{stage}_memory": memory}


def _measure_one(
    layer: nn.Module,
    x: Tensor,
    repeats: int,
    optimizer_bytes: float,
    clock: Callable[[], float],
) -> tuple[Tensor, LayerCost]:
    parameters = list(layer.parameters())
    before = [parameter.grad for parameter in parameters]
    saved_bytes: dict[int, int] = {}
    own = {_storage_of(tensor) for tensor in (*parameters, *layer.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        if _storage_of(tensor) not in own:
            saved_bytes[_storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    seconds = []
    # The first pass allocates memory and chooses algorithms.
    for _ in range(repeats + 1):
        saved_bytes.clear()
        for parameter in parameters:
            parameter.grad = None
        entering = x.detach().requires_grad_(x.is_floating_point())
        began = _now(clock, x.device)
        with torch.autograd.graph.saved_tensors_hooks(keep, _same):
            output: Any = layer(entering)
        output.backward(torch.ones_like(output))
        seconds.append(_now(clock, x.device) - began)
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    weights = sum(
        parameter.nbytes + parameter.requires_grad * (parameter.nbytes + optimizer_bytes * parameter.numel())
        for parameter in parameters
    )
    cost = LayerCost(
        seconds=median(seconds[1:]),
        weights=float(weights),
        activations=float(sum(saved_bytes.values())),
    )
    return output.detach(), cost


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _now(clock: Callable[[], float], device: torch.device) -> float:
    if devices.is_accelerator(device):
        torch.accelerator.synchronize(device)
    return clock()
