"""Numbers in the arguments of other trackers' functions."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from fp8scope.scalars import host_number, is_tensor, tensor_number

if TYPE_CHECKING:
    import torch

Number = Union[float, "torch.Tensor"]
"""A number on the host, or a tensor of one element on a device."""
Key = float | str
"""Equal for equal numbers; that of a tensor on a device stands for its memory, not to be freed meanwhile."""

MAX_DEPTH = 16


class NotANumberError(TypeError):
    """Raised for what a tracker stores and is no single number."""


def number_of(value: Any) -> Number:
    """Return the number; of a tensor on a device the tensor itself, so that nothing waits for the device.

    Raises NotANumberError for everything else: texts, None, images, arrays of several elements.
    """
    if type(value) is float:
        return value
    if is_tensor(value):
        if value.numel() != 1:
            raise NotANumberError
        # Without the graph that it may come from.
        return tensor_number(value) if value.is_cpu else value.detach()
    if value is None or isinstance(value, str | bytes | list | tuple | set):
        raise NotANumberError
    try:
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            raise NotANumberError
        return host_number(value)
    except (TypeError, ValueError, OverflowError):
        raise NotANumberError from None


def key_of(number: Number) -> Key:
    """Return what tells whether two numbers are the same, NaN included."""
    if isinstance(number, float):
        return number if number == number else "nan"
    # The memory is that of the script's tensor. Asking for its address does not wait for the device.
    return f"{number.device} {number.data_ptr()} {number._version}"


def same(number: Number, other: Number | None) -> bool:
    """Return whether both are the same number."""
    return other is not None and key_of(number) == key_of(other)


def flattened(values: Mapping[Any, Any], separator: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield names and values; those of nested mappings after the mapping's name and `separator`."""
    for name, value in values.items():
        if isinstance(value, Mapping) and depth < MAX_DEPTH:
            for inner, nested in flattened(value, separator, depth + 1):
                yield f"{name}{separator}{inner}", nested
        else:
            yield str(name), value


def count_of(step: Any) -> int | None:
    """Return a tracker's step as an integer that float64 can hold; None for anything else."""
    if type(step) is int:
        return step if -(2**53) < step < 2**53 else None
    try:
        if step is None or (is_tensor(step) and not step.is_cpu):
            return None
        number = host_number(step)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(number) if math.isfinite(number) and abs(number) < 2**53 else None
