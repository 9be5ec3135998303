"""The data of one run that the quantities are computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope_dashboard.statistics.arrays import Floats

# A run takes part if it reaches at least this share of the compared range.
REACH: Final = 0.9


@dataclass(frozen=True)
class MeasuredScalar:
    """A scalar of a run: steps int64[N], increasing; values float64[N], which may be NaN or infinite."""

    steps: NDArray[np.int64]
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> MeasuredScalar:
        """The points with a finite value."""
        finite = np.isfinite(self.values)
        return self if finite.all() else MeasuredScalar(self.steps[finite], self.values[finite])


@dataclass(frozen=True)
class MeasuredRun:
    """One run.

    Attributes:
        loss: the training loss.
        tokens: float64[N], tokens seen at the end of each step of `loss`; None if not logged at each.
        scalars: other scalars by name. Each may be missing, and logged at other steps than the loss.
    """

    loss: MeasuredScalar
    tokens: Floats | None = None
    scalars: Mapping[str, MeasuredScalar] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """The last step with a loss; 0 if there is none."""
        return float(self.loss.steps[-1]) if len(self.loss) else 0.0


def reaching(
    ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun]
) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """The runs of both arms that reach (nearly) as far as the first run and the furthest baseline run.

    The first run of `ours` always takes part. Without it or without a baseline, both are empty.
    """
    if not ours or not len(ours[0].loss) or not any(len(run.loss) for run in theirs):
        return [], []
    horizon = REACH * min(ours[0].end, max(run.end for run in theirs))
    return (
        [ours[0], *(run for run in ours[1:] if run.end >= horizon)],
        [run for run in theirs if run.end >= horizon],
    )
