"""Numbers as scripts give them (Python, NumPy, torch), read without importing torch."""

import operator
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

if TYPE_CHECKING:
    import torch

_tensor_type: type | None = None


def is_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Return whether `value` is a torch tensor; does not import torch."""
    global _tensor_type
    if _tensor_type is None:
        _tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
        if _tensor_type is None:
            return False
    return isinstance(value, _tensor_type)


def tensor_number(x: "torch.Tensor") -> float:
    """The number in a host tensor of one element. Raises ValueError if it has several elements."""
    if x.dim():
        if x.numel() != 1:
            raise ValueError(f"a scalar has one element, this has {x.numel()}: reduce it first (.mean())")
        x = x.reshape(())
    # Not `.item()`, the call that waits for a device: `tolist` reads the host's memory as it is.
    number: Any = x.tolist()
    return float(number)


def host_number(value: object) -> float:
    """A number on the host as a float. Raises TypeError or ValueError if `value` is not one number."""
    if is_tensor(value):
        return tensor_number(value)
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise ValueError(f"a scalar has one element, this has {value.size}: reduce it first (.mean())")
        return float(value.reshape(()) if value.ndim else value)
    if isinstance(value, str | bytes):
        raise TypeError(f"a scalar must be a number, got {value!r:.100}")
    try:
        return float(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"a scalar must be a number, got a {type(value).__name__}") from None


def whole_number(value: object) -> int:
    """A step's number. Raises TypeError or ValueError unless it is an integer from 0 to 2**63 - 1."""
    number = operator.index(value)  # type: ignore[arg-type]
    if not 0 <= number < 2**63:
        raise ValueError(f"a step's number is from 0 to 2**63 - 1, got {number}")
    return number


def whole_steps(every: object) -> int:
    """`every` as given to `watch`. Raises ValueError unless it is an integer of 0 or more."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ValueError(f"every must be a whole number of steps, or 0 for never, got {every!r}")
    return every
