"""A gross rise among the first points of a run, before its noise is known well enough for smaller ones.

The latest POINTS points or more must all be above a limit, and their mean above it by more than their noise.
The noise is that of the points before them, and of one point: points that are correlated average out to
nothing less. A run that is above from its first point on is judged by its latest POINTS and all before them:
these must agree far better than the rise is high. Each look has a share LEVEL of alpha, as a quantile of
Student's t.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fp8scope_dashboard.statistics.student import upper_quantile

# The rise that is gross, relative to the loss: no healthy runs of one configuration differ by so much.
LIMIT = 0.2
# Points that must be above it, and before them.
POINTS, MIN_BEFORE = 5, 5
# Share of alpha of one look: there are fewer than 64.
LEVEL = 1e-3
# Relative differences that are larger are from a reference of (nearly) 0.
UNUSABLE = 1e6


@dataclass(frozen=True)
class Rise:
    """A gross rise: the step at which it begins, its points up to now, and their mean."""

    onset: int
    points: int
    mean: float


def rise(points: Sequence[tuple[int, float]], limit: float, alpha: float) -> Rise | None:
    """The rise that the latest of these points, steps and differences, are part of; None if there is none."""
    differences = [difference for _, difference in points]
    begin = len(differences)
    while begin and differences[begin - 1] > limit:
        begin -= 1
    since = len(differences) - begin
    if since < POINTS or max(abs(difference) for difference in differences) > UNUSABLE:
        return None
    judged = since if begin >= MIN_BEFORE else POINTS
    before, latest = differences[:-judged], differences[-judged:]
    if len(before) < MIN_BEFORE:
        return None
    quantile = upper_quantile(LEVEL * alpha, len(before) - 1)
    noise = statistics.stdev(before) * math.sqrt(1.0 + 1.0 / len(before))
    mean = statistics.fmean(latest)
    return Rise(points[begin][0], judged, mean) if mean > limit + quantile * noise else None
