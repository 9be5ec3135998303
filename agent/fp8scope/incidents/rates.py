"""The learning rates that optimizers step with: noted in a run, and set or compared in a replay.

A script that computes its learning rate from a counter of its own begins with the first value, not with that
of the step where a replay begins.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fp8scope_kernels.hooks import register_step_pre_hook

MAX_CALLS = 64
"""Steps of optimizers that are noted of one group of batches."""

LearningRates = list[float | None]
"""Of the parameter groups of one optimizer. None for a tensor on a device: reading it would wait."""


def rates_of(optimizer: Optimizer) -> LearningRates:
    """The present learning rates of an optimizer."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [
        None if rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu") else float(rate)
        for rate in rates
    ]


def set_rates(optimizer: Optimizer, rates: Sequence[float | None]) -> None:
    """Set the learning rates of an optimizer where they are known."""
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        if rate is None:
            continue
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def before_steps(optimizers: Sequence[Optimizer], call: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Call `call(optimizer)` before each step of these optimizers; returns a function that ends it.

    The optimizers do not keep the owner of a bound method alive.
    """
    reference = weakref.WeakMethod(call) if hasattr(call, "__self__") else lambda: call

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        method = reference()
        if method is not None:
            method(optimizer)

    handles = [register_step_pre_hook(optimizer, hook) for optimizer in optimizers]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end
