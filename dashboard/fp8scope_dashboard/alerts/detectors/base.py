"""Findings, and numbers in the form that JSON and messages need."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fp8scope_dashboard.text.numbers import LARGEST, rounded

# The state of a detector between calls. JSON types only, so that it can be stored between two batches.
State = dict[str, Any]
# Tensors that the evidence names.
NAMED = 10
# Tensors that leave their range at most so many steps apart have one cause.
SAME_CAUSE = 200


@dataclass(frozen=True, kw_only=True)
class ConditionChange:
    """The start (`opened`) or the end of a condition.

    Attributes:
        update: more is known of the open condition with this onset, such as further tensors.
        onset_step: the first step of the condition.
        step: the step at which the detector found the condition, or its end.
        value, threshold: the observed value and its limit; None if not a finite number.
        message: one sentence with the numbers.
        evidence: JSON types only.
    """

    opened: bool
    onset_step: int
    step: int
    value: float | None = None
    threshold: float | None = None
    message: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    update: bool = False


def began(onset: int, told: str = "") -> str:
    """The sentence of a message that says since when; `told` names the alert that has told it before."""
    as_told = f", as the alert '{told}' says" if told else ""
    return f"It began at about step {onset:,}{as_told}."


def usable(value: float) -> bool:
    """Return whether a value is finite and small enough to be squared; larger ones count as infinite."""
    return abs(value) <= LARGEST


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinities, which JSON cannot hold."""
    return value if usable(value) else None


def in_words(value: float) -> str:
    """A value for a message: `2.31`, `1,580`, `3.1e-6`, NaN, or 'infinity'."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity" if value > 0 else "minus infinity"
    return rounded(value, 4)


def percent(fraction: float) -> str:
    """A fraction as a percentage with three significant digits."""
    return f"{rounded(100.0 * fraction, 3)} %"
