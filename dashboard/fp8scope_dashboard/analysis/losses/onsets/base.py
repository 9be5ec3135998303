"""The state of the processes, and numbers in the form that JSON needs."""

from __future__ import annotations

from typing import Any

from fp8scope_dashboard.text.numbers import LARGEST

# JSON types only, so that it can be stored between two batches.
State = dict[str, Any]


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinities, which JSON cannot hold."""
    return value if abs(value) <= LARGEST else None
