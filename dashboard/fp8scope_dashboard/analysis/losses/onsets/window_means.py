"""A test of the mean of the latest points against a tolerance, in windows of 16, 32, 64, ... points.

A rise is seen first by the shortest window whose noise is small enough beside it. A window consists of BLOCKS
blocks and is judged after each of them; so the state is BLOCKS means for each length.

**Limit.** A healthy difference is a lasting offset plus noise. They are independent, so that their bounds add
in quadrature: sqrt(T^2 + q^2 V_w), with T the tolerance of offsets, V_w the variance of a window's mean, and
q the quantile of Student's t at the degrees of freedom with which V_w is known.

An offset is not constant either: a run that has varied varies a little further, and comes back. So the noise
counts as MIN_NOISE of T at least. That changes nothing where the noise is visible.

**Outliers.** A point counts as at most CLIP times the limit of the shortest window: four in five of its
points must be high. Healthy runs have bursts of some points.

**Budget.** From 2^e to 2^(e+1) points BLOCKS 2^e / w windows of each of e - 4 lengths are judged. They
share alpha / ((e - 5) (e - 4)), which sums to alpha over all e >= 6. By the union bound the probability of
any false alarm is at most alpha, whatever the dependence between windows, if the noise of a window's mean is
normal and the offset within T. Means of several points nearly are; clipping keeps heavy tails out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fp8scope_dashboard.analysis.losses.onsets.base import State
from fp8scope_dashboard.analysis.losses.onsets.noise import Model
from fp8scope_dashboard.statistics.student import upper_quantile

FIRST_EPOCH = 6
# Blocks of a window. Those of the shortest window are single points.
BLOCKS = 16
CLIP = 1.25
# The least share of the tolerance that counts as noise.
MIN_NOISE = 0.42


def fresh() -> State:
    """The state before the first point."""
    return {"levels": [], "limits": []}


def limits(model: Model, tolerance: float, count: int, alpha: float) -> list[float]:
    """The limits of windows of BLOCKS, 2 BLOCKS, ... points, at this number of points."""
    epoch = max(int(math.log2(max(count, 1))), FIRST_EPOCH)
    share = alpha / ((epoch - FIRST_EPOCH + 1) * (epoch - FIRST_EPOCH + 2))
    windows = [BLOCKS << i for i in range(epoch - 4)]
    window_share = share / (BLOCKS * 2.0**epoch * len(windows))
    reaches = [_reach(model, window, window_share * window) for window in windows]
    whole = 0.0
    if model.whole is not None:
        # Noise that outlasts the run has one value in all windows.
        whole = math.sqrt(model.whole.variance) * _quantile(model.whole.freedom, share)
    return [math.hypot(tolerance, max(reach, whole, MIN_NOISE * tolerance)) for reach in reaches]


def lasting(tolerance: float) -> float:
    """The limit of the longest windows, in which no noise is left."""
    return math.hypot(tolerance, MIN_NOISE * tolerance)


def _reach(model: Model, window: int, level: float) -> float:
    """Return how far the noise of a window's mean reaches, at a level."""
    white = model.white
    if white is not None and window >= white.length:
        return math.sqrt(white.variance * white.length / window) * _quantile(white.freedom, level)
    # Noise that outlasts the window: all of what longer blocks show.
    reaches = [
        math.sqrt(scale.variance) * _quantile(scale.freedom, level * max(scale.length / window, 1.0))
        for scale in model.longer
        if scale.length >= window or scale is model.longer[-1]
    ]
    return max(reaches)


def _quantile(freedom: float, level: float) -> float:
    return _student(round(4.0 * freedom) / 4.0, float(f"{level:.2g}"))


@lru_cache(maxsize=4096)
def _student(freedom: float, level: float) -> float:
    return upper_quantile(level, freedom)


@dataclass(frozen=True)
class Above:
    """A window of so many points, whose mean is above its limit."""

    points: int
    mean: float
    limit: float


def add(state: State, value: float) -> Above | None:
    """Add a point, which may be infinite; return a window above its limit that ends with it, if any.

    Of several, the longest. Nothing is judged, or remembered, before there are limits.
    """
    bounds: Sequence[float] = state["limits"]
    if not bounds:
        return None
    above = None
    mean = min(value, CLIP * bounds[0])
    levels: list[State] = state["levels"]
    for level in range(64):
        if level == len(levels):
            levels.append({"last": [], "waiting": None})
        block = levels[level]
        latest = [*block["last"], mean]
        if len(latest) == BLOCKS and level < len(bounds):
            of_window = sum(latest) / BLOCKS
            if of_window > bounds[level]:
                above = Above(BLOCKS << level, of_window, bounds[level])
        block["last"] = latest[1 - BLOCKS :]
        if block["waiting"] is None:
            block["waiting"] = mean
            break
        mean, block["waiting"] = 0.5 * (block["waiting"] + mean), None
    return above
