"""The loss as the script computes it: what `backward` is called on.

While something listens, `torch.autograd.backward` (which `Tensor.backward` calls) tells before and after each
backward pass of the script. `GradScaler.scale` remembers the loss that it scaled, and `GradScaler.step` tells
of the steps that it skips. Nothing of the script's is changed, and what they raise passes through.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

_UNSCALED = "_fp8scope_unscaled"


class Listener(Protocol):
    """Is told of backward passes and of skipped steps; never raises."""

    def before_backward(self) -> Any:
        """Returns what `after_backward` is to be given."""

    def after_backward(self, before: Any, loss: "Loss | None") -> None:
        """`loss`: None when the backward pass began from anything but one scalar."""

    def before_scaler_step(self, optimizer: Optimizer) -> Any:
        """Returns what `after_scaler_step` is to be given."""

    def after_scaler_step(self, optimizer: Optimizer, before: Any) -> None:
        """`GradScaler.step(optimizer)` has returned, whether it called the optimizer or not."""

    def failed(self, kind: str, error: Exception) -> None:
        """Something of ours has raised, on the way to the listener; it is to be counted."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One scalar that was differentiated. `divisor`: the plain number that it was divided by last, else 1."""

    value: Tensor
    divisor: float


def combine(losses: Sequence[Loss], reduction: str, learned: float) -> tuple[Tensor, float]:
    """One step's loss from its backward passes, and the divisor that was used for it (1 for none).

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
    """The scalar that `backward(tensors, gradients)` differentiates; None when it is not one scalar."""
    given = (
        [tensors]
        if isinstance(tensors, Tensor)
        else list(tensors)
        if isinstance(tensors, tuple | list)
        else []
    )
    if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].numel() != 1 or _is_given(gradients):
        return None
    loss = getattr(given[0], _UNSCALED, given[0])
    value = loss.detach().reshape(())
    # A graph that is replayed writes its loss to the same place again.
    value = value if value.device.type == "cpu" else value.clone()
    # The value counts whatever becomes of the divisor.
    return Loss(value, _counting(1.0, "reading a loss's divisor", _divisor, loss))


def _is_given(gradients: Any) -> bool:
    return (
        any(one is not None for one in gradients)
        if isinstance(gradients, tuple | list)
        else gradients is not None
    )


def _divisor(loss: Tensor) -> float:
    """The number that the loss was divided by in its last operation; 1 when that was another operation."""
    node: Any = loss.grad_fn
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return 1.0
    other = node._saved_other
    # A plain number arrives as a CPU tensor without dimensions. On a device it would have to be waited for.
    if not isinstance(other, Tensor) or other.device.type != "cpu" or other.ndim or other.requires_grad:
        return 1.0
    if other.is_complex():
        return 1.0
    number = float(other)
    if node.name() == "MulBackward0":
        number = 1 / number if number else math.inf
    # Zero and what is not finite, or becomes so, divide nothing: the loss is what it is.
    if not math.isfinite(number) or number == 0:
        return 1.0
    return float(round(number)) if abs(number - round(number)) < 1e-6 else number


_listeners: list[Listener] = []
_Original = tuple[Any, str, Callable[..., Any], Callable[..., Any]]
_replaced: list[_Original] = []
"""Owner, name, what was there, and what we put there."""


def listen(listener: Listener) -> None:
    """Tell `listener` from now on."""
    known = [(owner, name) for owner, name, _, _ in _replaced]
    for owner, name, wrap in (
        (torch.autograd, "backward", _telling_backward),
        (GradScaler, "scale", _remembering_scale),
        (GradScaler, "step", _telling_step),
    ):
        if (owner, name) not in known:
            original = getattr(owner, name)
            ours = wrap(original)
            setattr(owner, name, ours)
            _replaced.append((owner, name, original, ours))
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Tell `listener` no more. The last one takes everything back."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        for entry in list(_replaced):
            owner, name, original, ours = entry
            # Somebody may have wrapped ours since: then it stays, does nothing, and is used again later.
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
                _replaced.remove(entry)


def is_replaying() -> bool:
    """Whether this is inside a backward pass: activation checkpointing calls forward and backward there."""
    return bool(torch._C._current_graph_task_id() != -1)


def _telling_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _listeners or is_replaying():
            return original(tensors, grad_tensors, *args, **kwargs)
        # Taken first: what the loss was computed from is gone afterwards.
        loss = _counting(None, "reading the loss", loss_of, tensors, grad_tensors)
        told = [(listener, listener.before_backward()) for listener in tuple(_listeners)]
        result = original(tensors, grad_tensors, *args, **kwargs)
        for listener, before in told:
            listener.after_backward(before, loss)
        return result

    return backward


def _remembering_scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: GradScaler, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if _listeners and isinstance(outputs, Tensor) and scaled is not outputs:
            _counting(None, "remembering the unscaled loss", setattr, scaled, _UNSCALED, outputs)
        return scaled

    return scale


def _telling_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        told = [(listener, listener.before_scaler_step(optimizer)) for listener in tuple(_listeners)]
        result = original(self, optimizer, *args, **kwargs)
        for listener, before in told:
            listener.after_scaler_step(optimizer, before)
        return result

    return step


def _counting(otherwise: Any, kind: str, function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns; where it raises, `otherwise`, and every listener counts it."""
    try:
        return function(*args)
    except Exception as error:
        for listener in tuple(_listeners):
            listener.failed(kind, error)
        return otherwise
