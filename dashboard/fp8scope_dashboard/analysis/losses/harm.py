"""A harm that has begun in the course of a run: the alert's test on the compared points.

The confidence sequence of a pair judges the last tenth of the run by the noise of the recent half. A harm
that has begun within that half is part of its noise, so that it is found at the end only. This test judges
what follows an onset by the noise before it (`onsets.process`), and is valid at all steps together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fp8scope_dashboard.analysis.losses.noise import FREEDOM_OF_DIFFERENCE
from fp8scope_dashboard.analysis.losses.onsets.base import State
from fp8scope_dashboard.analysis.losses.onsets.process import Change, advance
from fp8scope_dashboard.analysis.losses.onsets.window_means import BLOCKS
from fp8scope_dashboard.analysis.losses.seeds import PUBLIC, PUBLIC_NATS
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.student import upper_quantile
from fp8scope_dashboard.text.numbers import LARGEST, SMALLEST

# Longer runs are averaged over 2, 4, 8, ... points, so that a comparison stays cheap. The factor depends on
# the number of points only, and changes rarely.
MAX_POINTS: Final = 4096
# The parameters of the rule `above_baseline` as it comes.
BLOCK, RECOVER = 2.0, 10.0
# One-sided level of the interval by the scatter within a window, which is a floor only.
SCATTER_LEVEL = 0.025


@dataclass(frozen=True, kw_only=True)
class Harm:
    """A stretch above the baseline that goes on at the last compared point.

    Attributes:
        onset, decided: where it began, as far as it can be told, and where it was decided; indices of the
            compared points.
        start: the first point of the window from there to the end that shows it best.
        delta: mean difference in this window; `half` the half-width of its interval by the noise before the
            onset.
        tolerance: what seeds of one configuration may differ by. The interval is wholly above it, but for a
            run that has come back and must stay for a while.
    """

    onset: int
    decided: int
    start: int
    delta: float
    half: float
    tolerance: float


def harm_of(
    ours: Floats, theirs: Floats, *, margin: float, alpha: float, spread: float, nats: bool = False
) -> Harm | None:
    """The harm that goes on at the end of a run; None if there is none.

    Args:
        ours, theirs: float64[m, n] and float64[K, n], finite losses of two arms at the compared points.
        spread: prior spread between seeds, relative or in nats.
        nats: differences are not divided by the baseline's loss.
    """
    if nats:
        # As relative differences of losses near 1, on the scale of relative spreads.
        scale = PUBLIC.spread / PUBLIC_NATS.spread
        centre = theirs.mean(axis=0)
        ours, theirs = (1.0 + scale * (arm - centre) for arm in (ours, theirs))
    else:
        scale = 1.0
    group = 1
    while -(-ours.shape[1] // group) > MAX_POINTS:
        group *= 2
    loss, baselines = _grouped(ours.mean(axis=0)[None], group)[0], _grouped(theirs, group)
    parameters = {
        "margin": scale * margin,
        "alpha": alpha,
        "block": BLOCK,
        "recover": RECOVER,
        "runs": float(len(ours)),
        "spread": scale * spread,
    }
    state, changes = advance({}, np.arange(len(loss)), loss, baselines, parameters)
    opened = [change for change in changes if change.opened]
    if not state["open"] or opened[-1].limit is None:
        return None
    return _shown(state, opened[-1], _relative(loss, baselines), group, scale)


def _relative(loss: Floats, baselines: Floats) -> Floats:
    """The relative differences as the test has them: none is beyond LARGEST, and those to 0 are."""
    centre = baselines.mean(axis=0)
    difference = loss - centre
    positive = np.abs(centre) >= SMALLEST
    relative = np.divide(difference, np.abs(centre), out=np.sign(difference) * LARGEST, where=positive)
    return np.asarray(np.clip(relative, -LARGEST, LARGEST))


def _shown(state: State, change: Change, difference: Floats, group: int, scale: float) -> Harm:
    """The harm with the window since its onset whose interval is furthest above 0."""
    limits, tolerance = state["means"]["limits"], state["tolerance"]
    # The window that decided may begin before the onset.
    since = len(difference) - change.onset + max(change.window - change.points, 0)
    windows = [(BLOCKS << level, limit) for level, limit in enumerate(limits)]
    if not windows:
        # A gross rise of a run that has few points.
        windows = [(since, change.limit or tolerance)]
    best, bound = (0, 0.0, 0.0), -np.inf
    for points, limit in windows:
        if points > since and best[0]:
            break
        window = difference[-points:]
        mean, half = float(window.mean()), max(limit - tolerance, _scatter(window))
        if mean - half > bound or not best[0]:
            best, bound = (min(points, len(difference)), mean, half), mean - half
    points, mean, half = best
    return Harm(
        onset=change.onset * group,
        decided=change.step * group,
        start=(len(difference) - points) * group,
        delta=mean / scale,
        half=half / scale,
        tolerance=tolerance / scale,
    )


def _scatter(window: Floats) -> float:
    """Half-width of the mean of a window by its own noise, from successive differences of its block means.

    The noise before an onset may be less: that of a run that is bitwise equal to its baseline until FP8
    begins is none. Differences leave a rise within the window out.
    """
    blocks = [float(block.mean()) for block in np.array_split(window, min(BLOCKS, len(window)))]
    square = float((np.diff(blocks) ** 2).mean()) if len(blocks) > 1 else 0.0
    freedom = max((len(blocks) - 1) * FREEDOM_OF_DIFFERENCE, 1.0)
    return upper_quantile(SCATTER_LEVEL, freedom) * float(np.sqrt(0.5 * square / len(blocks)))


def _grouped(rows: Floats, group: int) -> Floats:
    """Means of so many successive values of each row; a rest at the end is left out."""
    if group == 1:
        return rows
    points = rows.shape[1] // group
    return np.asarray(rows[:, : points * group].reshape(len(rows), points, group).mean(axis=2))
