"""The parts of a step's time, and their shares over the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

import numpy as np

from fp8scope_dashboard.pages.run.efficiency import bucket_means
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.telemetry import queries

WORK: Final = ("forward", "loss", "backward", "optimizer")
WAITS: Final = ("data", "copy", "communication", "checkpoint")
REST: Final = "rest"
PARTS: Final = (*WORK, REST, *WAITS)
"""From the bottom of the stack to its top, as the agent calls them."""


def scalar_of(part: str) -> str:
    """Return the name of the scalar with the seconds of a part, which is its name in the glossary."""
    return f"anatomy/{part}_seconds"


MAX_STEPS: Final = 200_000
"""The most steps that are read; the last steps of a longer run."""
SCALARS: Final = tuple(scalar_of(part) for part in PARTS)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the time, 0 to 1, in buckets of steps: `x` float64[N]; `shares` float64[PARTS, N]."""

    x: Floats
    shares: Floats


def read_shares(run_id: UUID, *, first: int | None, last: int | None, points: int) -> Shares:
    """Return the shares of the parts over the steps first..last, in at most `points` buckets.

    They are those of the lowest rank that measures them.
    """
    rows = queries.lowest_rank_scalars(run_id, SCALARS, first, last, most=MAX_STEPS)
    if rows is None:
        return shares_of(np.zeros(0), np.zeros((len(PARTS), 0)))
    work = rows.values[[PARTS.index(part) for part in WORK]]
    measured = np.isfinite(work).all(axis=0)
    split = bucket_means(rows.steps[measured], np.nan_to_num(rows.values[:, measured], nan=0.0), points)
    return shares_of(split.x, split.seconds)


def shares_of(x: Floats, seconds: Floats) -> Shares:
    """Return the shares of `seconds` float64[PARTS, N] in their sum. Invalid columns are left out."""
    valid = (np.isfinite(seconds) & (seconds >= 0)).all(axis=0) & (seconds.sum(axis=0) > 0)
    seconds = seconds[:, valid]
    return Shares(x=x[valid], shares=seconds / seconds.sum(axis=0))
