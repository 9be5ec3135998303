"""The steps of a run on a chart over tokens or time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.pages.charts.marks import Mark
from fp8scope_dashboard.statistics.arrays import Floats


@dataclass(frozen=True, kw_only=True)
class StepPlaces:
    """The steps of a line and where they are on the horizontal axis.

    Attributes:
        steps, x: float64[N], the steps ascending.
        drawn: int[D], the indices of those that the chart draws.
    """

    steps: Floats
    x: Floats
    drawn: NDArray[np.integer]

    @property
    def drawn_steps(self) -> Floats:
        """The steps that the chart draws, float64[D]."""
        return np.asarray(self.steps[self.drawn], np.float64)

    def of(self, step: float) -> float:
        """The place of a step, between the two that are known; NaN outside of the line."""
        return float(np.interp(step, self.steps, self.x, left=math.nan, right=math.nan))


def placed(marks: Sequence[Mark], places: StepPlaces) -> list[Mark]:
    """The marks of steps as marks of the axis; without those outside of the line."""
    moved = [replace(mark, x=places.of(mark.x)) for mark in marks]
    return [mark for mark in moved if math.isfinite(mark.x)]
