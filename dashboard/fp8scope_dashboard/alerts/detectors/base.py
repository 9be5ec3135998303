"""What all detectors share: findings, and numbers that survive JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fp8scope_dashboard.text.numbers import LARGEST

# What a detector remembers between calls: JSON types only, so that it can be stored between two batches.
State = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A condition began (`opened`) or is gone.

    Attributes:
        onset_step: the first step of the condition.
        step: the step at which the detector was sure, or at which the condition was gone.
        value, threshold: what was seen and what it was held against; None where there is no finite number.
        message: one plain sentence with the numbers.
        evidence: JSON types only.
    """

    opened: bool
    onset_step: int
    step: int
    value: float | None = None
    threshold: float | None = None
    message: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


def usable(value: float) -> bool:
    """Whether a value is a number to compute with: one too large to be squared counts as infinite."""
    return abs(value) <= LARGEST


def finite(value: float) -> float | None:
    """The value, or None where it is NaN or infinite, for which JSON has no number."""
    return value if usable(value) else None


def words(value: float) -> str:
    """A value as a person would write it: four significant digits, NaN, or 'infinity'."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity" if value > 0 else "minus infinity"
    return f"{value:.4g}"


def percent(fraction: float) -> str:
    """A fraction as per cent, three significant digits."""
    return f"{100.0 * fraction:.3g} %"
