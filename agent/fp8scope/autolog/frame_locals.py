"""Reads the local variables of running functions without keeping them alive."""

import inspect
import sys
from types import FrameType
from typing import Any


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the local variables of a frame.

    Before Python 3.13 a frame keeps the dictionary that `f_locals` returns, and with it a model that the
    function deletes later. So this empties it, unless the script has it from `locals()`.
    """
    values = frame.f_locals
    copied = dict(values)
    # References: the frame's, `values`, and the argument of the call. Modules and classes have no copy.
    is_copy = type(values) is dict and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_copy and sys.getrefcount(values) <= 3:
        values.clear()
    return copied
