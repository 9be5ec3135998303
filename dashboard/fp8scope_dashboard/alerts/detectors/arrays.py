"""Arrays in the JSON state of a detector."""

from __future__ import annotations

import base64
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


def pack(array: NDArray[Any]) -> str:
    """The bytes of a one-dimensional array as text. Base64 is a third of the size of a list of numbers."""
    return base64.b64encode(array.tobytes()).decode("ascii")


def unpack(text: str | None, length: int, fill: Scalar) -> NDArray[Scalar]:
    """The array of `pack`, of the type of `fill`; with `fill` for columns that were added since."""
    array = np.full(length, fill, dtype=fill.dtype)
    if text:
        stored = np.frombuffer(base64.b64decode(text), dtype=fill.dtype)[:length]
        array[: len(stored)] = stored
    return array
