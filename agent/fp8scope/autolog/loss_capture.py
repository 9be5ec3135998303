"""Captures the loss of a training script: the scalar that `backward` is called on.

While there is a listener, `torch.autograd.backward` (which `Tensor.backward` calls), `GradScaler.scale` and
`GradScaler.step` are wrapped. Listeners are notified before and after each backward pass and each step of a
scaler. The results of the functions and their exceptions stay the same.
"""

import functools
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from fp8scope.observe.tensors.base import inside_backward
from fp8scope.process.patches import Patch

_unscaled: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()
"""The losses from which `GradScaler.scale` made others. An attribute of those would be in their pickles."""


class LossListener(Protocol):
    """Notified of backward passes and of skipped optimizer steps. Its methods never raise."""

    def before_backward(self) -> Any:
        """Called before a backward pass; the result is passed to `after_backward`."""

    def after_backward(self, before: Any, loss: "Loss | None") -> None:
        """Called after a backward pass; `loss` is None if it did not start from one scalar."""

    def before_scaler_step(self, optimizer: Optimizer) -> Any:
        """Called before `GradScaler.step`; the result is passed to `after_scaler_step`."""

    def after_scaler_step(self, optimizer: Optimizer, before: Any) -> None:
        """Called after `GradScaler.step(optimizer)`, whether it called the optimizer or not."""

    def failed(self, kind: str, error: Exception) -> None:
        """Called to count an internal error."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar that was differentiated. `divisor` is the number that it was divided by last, or 1."""

    value: Tensor
    divisor: float


def combine(losses: Sequence[Loss], reduction: str, learned: float) -> tuple[Tensor, float]:
    """Return the loss of a step from its backward passes, and the divisor that was used (1 for none).

    `reduction` `sum` adds them up. `mean` averages, except that losses which were divided by their number
    (gradient accumulation: `(loss / n).backward()`, n times) are added up. `learned` is the divisor of
    earlier steps: an epoch's last step may have fewer passes than it divides by.
    """
    values = [loss.value for loss in losses]
    count = len(values)
    total = values[0] if count == 1 else torch.stack(values).sum()
    divisors = {loss.divisor for loss in losses}
    if reduction == "sum":
        return total, 1.0
    if divisors == {float(count)}:
        return total, float(count)
    if divisors == {learned} and learned != 1.0:
        return total * (learned / count), learned
    return (total if count == 1 else total / count), 1.0


def loss_of(tensors: Any, gradients: Any) -> Loss | None:
    """Return the scalar that `backward(tensors, gradients)` differentiates, or None."""
    given = (
        [tensors]
        if isinstance(tensors, Tensor)
        else list(tensors)
        if isinstance(tensors, tuple | list)
        else []
    )
    if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].numel() != 1 or _is_given(gradients):
        return None
    loss = unscaled(given[0])
    value = loss.detach().reshape(())
    # A CUDA graph that is replayed overwrites its loss.
    value = value if value.device.type == "cpu" else value.clone()
    # The value is kept even if the divisor cannot be read.
    return Loss(value, _counting(1.0, "reading a loss's divisor", divisor, loss))


def _is_given(gradients: Any) -> bool:
    return (
        any(gradient is not None for gradient in gradients)
        if isinstance(gradients, tuple | list)
        else gradients is not None
    )


def divisor(loss: Tensor) -> float:
    """Return the number that the loss was divided by in its last operation; 1 if that was no division."""
    node: Any = loss.grad_fn
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return 1.0
    other = node._saved_other
    # A Python number arrives as a CPU tensor without dimensions. Reading one from a device would wait.
    if not isinstance(other, Tensor) or other.device.type != "cpu" or other.ndim or other.requires_grad:
        return 1.0
    if other.is_complex():
        return 1.0
    number = float(other)
    if node.name() == "MulBackward0":
        number = 1 / number if number else math.inf
    # Zero and numbers that are not finite are no divisor.
    if not math.isfinite(number) or number == 0:
        return 1.0
    return float(round(number)) if abs(number - round(number)) < 1e-6 else number


class LightTaker(Protocol):
    """Takes losses in place of the listeners: `fp8scope.autolog.light_steps.LightSteps`."""

    def backward(self, original: Callable[..., Any], loss: Tensor, args: Any, kwargs: Any) -> Any:
        """Carry out `original(loss, None, *args, **kwargs)`."""


_light: LightTaker | None = None


def take_light(taker: LightTaker | None) -> None:
    """Let `taker` take losses, while there is only one listener; None: the listeners are notified again."""
    global _light
    _light = taker


def unscaled(loss: Tensor) -> Tensor:
    """Return the loss that a GradScaler has scaled to this one, or the same if none has."""
    return _unscaled.get(loss, loss) if len(_unscaled) else loss


def is_sole(listener: LossListener) -> bool:
    """Return whether there is no other listener."""
    return len(_listeners) == 1 and _listeners[0] is listener


_listeners: list[LossListener] = []
_patches: list[Patch] = []


def listen(listener: LossListener) -> None:
    """Notify `listener` from now on."""
    for owner, name, wrap in (
        (torch.autograd, "backward", _notifying_backward),
        (GradScaler, "scale", _remembering_scale),
        (GradScaler, "step", _notifying_step),
    ):
        if not any(patch.is_on(owner, name) for patch in _patches):
            _patches.append(Patch(owner, name, wrap))
    _listeners.append(listener)


def unlisten(listener: LossListener) -> None:
    """Stop notifying `listener`. The last one restores the functions."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        # A function that another library has wrapped since stays, does nothing, and is used again later.
        _patches[:] = [patch for patch in _patches if not patch.restore()]


def _notifying_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _listeners or inside_backward():
            return original(tensors, grad_tensors, *args, **kwargs)
        if (
            _light is not None
            and grad_tensors is None
            and len(_listeners) == 1
            and isinstance(tensors, Tensor)
        ):
            return _light.backward(original, tensors, args, kwargs)
        # Read before: the graph of the loss is freed by the backward pass.
        loss = _counting(None, "reading the loss", loss_of, tensors, grad_tensors)
        notified = [(listener, listener.before_backward()) for listener in tuple(_listeners)]
        result = original(tensors, grad_tensors, *args, **kwargs)
        for listener, before in notified:
            listener.after_backward(before, loss)
        return result

    return backward


def _remembering_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if _listeners and isinstance(outputs, Tensor) and scaled is not outputs:
            _counting(None, "remembering the unscaled loss", _unscaled.__setitem__, scaled, outputs)
        return scaled

    return scale


def _notifying_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        notified = [(listener, listener.before_scaler_step(optimizer)) for listener in tuple(_listeners)]
        result = original(self, optimizer, *args, **kwargs)
        for listener, before in notified:
            listener.after_scaler_step(optimizer, before)
        return result

    return step


def _counting(otherwise: Any, kind: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns. If it raises, count the error and return `otherwise`."""
    try:
        return function(*args)
    except Exception as error:
        for listener in tuple(_listeners):
            listener.failed(kind, error)
        return otherwise
