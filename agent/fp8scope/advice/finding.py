"""The advice of a check: its evidence, the expected gain, and the change to make."""

from collections.abc import Callable
from dataclasses import dataclass

from fp8scope.advice.record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The expected gain: the share of the step's time that is saved, between `low` and `high`, 0 to 1.

    `formula` says how both are computed, in the symbols that it explains.
    """

    low: float
    high: float
    formula: str

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"a gain is between 0 and 1, got {self.low} to {self.high}")


@dataclass(frozen=True, kw_only=True)
class AdviceFinding:
    """One practice that the run does not follow. `practice` names the check, `evidence` has the numbers."""

    practice: str
    title: str
    evidence: str
    gain: Gain
    change: str


Check = Callable[[RunRecord], AdviceFinding | None]
"""Looks at a run for one practice. Returns None without evidence."""


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
