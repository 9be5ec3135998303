"""Trouble in a training loss: not finite, a jump, or a rise. Pure functions of one curve.

The whole curve is known, so every point is judged against the level before it: the smallest running median so
far. A training loss falls or stays, so a level that is left upwards by more than its noise is trouble.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter

from fp8scope_dashboard.diagnosis.change_points import slope_change
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.robust import MAD_TO_SIGMA

Int64s = NDArray[np.int64]
TroubleKind = Literal["not_finite", "jump", "rise"]

# The median absolute deviation times this estimates the standard deviation of a normal distribution.
# A point is a spike at this many sigma and this share of its level; a running median is a rise at the smaller
# share. Neighbouring steps are correlated, and the level is the smallest of many medians, so that eight sigma
# here are about five of the noise. 5 and 10 %: what matters.
SIGMAS: Final = 8.0
# The logarithm of the loss must rise by so many of its own sigmas, too. Only noise of more than a fifth of
# the loss makes this the larger limit.
LOG_SIGMAS: Final = 5.0
SPIKE_SHARE: Final = 0.1
RISE_SHARE: Final = 0.05
# Points below which a level cannot be estimated.
MIN_POINTS: Final = 12
# Of a jump, the first point alone has this share of the whole rise within the next points.
ABRUPT_SHARE: Final = 0.6
SOON: Final = 10
# And the points just before it have less than this share of its rise.
CALM_SHARE: Final = 0.5
JUST_BEFORE: Final = 3
# Points of a rise in which its beginning is searched.
MAX_SEARCHED: Final = 2_000


@dataclass(frozen=True)
class Trouble:
    """One episode of trouble.

    Attributes:
        kind: `jump` if the first step of the episode has most of its rise, else `rise`.
        onset, until: its first and last step; `until` is None if the curve ends in it. The onset of a rise
            is where the curve bends, which is known only later.
        size: the largest rise over the level, relative to the level; infinite if not finite.
        left_noise: the first step outside of the noise; None: the onset.
    """

    kind: TroubleKind
    onset: int
    until: int | None
    size: float
    left_noise: int | None = None

    @property
    def certain_from(self) -> int:
        """The first step in which there is trouble for certain. What begins before it may be its cause."""
        return self.onset if self.left_noise is None else self.left_noise

    @property
    def lasts(self) -> bool:
        return self.until is None


def troubles(steps: Int64s, losses: Floats) -> list[Trouble]:
    """The episodes of a curve in order.

    Args:
        steps: int64[n], increasing.
        losses: float64[n]; NaN and infinities are losses that are not finite.
    """
    finite = np.isfinite(losses)
    episodes = [
        Trouble("not_finite", int(steps[begin]), None if end == len(steps) else int(steps[end - 1]), np.inf)
        for begin, end in _runs(~finite)
    ]
    episodes += _rises(steps[finite], losses[finite])
    return sorted(episodes, key=lambda episode: episode.onset)


def window_of(points: int) -> int:
    """Odd number of points of a running median: a twentieth of the curve, 5 to 51."""
    return int(np.clip(points // 20, 5, 51)) | 1


def _rises(steps: Int64s, losses: Floats) -> list[Trouble]:
    if len(losses) < MIN_POINTS:
        return []
    width = window_of(len(losses))
    smooth = median_filter(losses, width, mode="nearest")
    # The level before a point: the smallest running median that does not contain the point. Copies of the
    # first loss, which may be low by chance, must not outweigh the others.
    level = np.minimum.accumulate(median_filter(losses, 2 * width + 1, mode="reflect"))
    past = np.concatenate([np.full(width + 1, level[0]), level[: -(width + 1)]])
    past[: width + 1] = max(losses[0], level[0], float(np.median(losses[:width])))
    sigma = _local_noise(losses, width)
    limit = np.maximum(SIGMAS * sigma, SPIKE_SHARE * np.abs(past))
    # A point far above, or a running median above: noise cannot do the second for half a window.
    far = losses - past > limit
    lasting = smooth - past > np.maximum(0.5 * SIGMAS * sigma, RISE_SHARE * np.abs(past))
    if losses.min() > 0.0:
        # The noise of a small loss is skewed, so that batches reach many times its level by chance.
        factor = LOG_SIGMAS * _local_noise(np.log(losses), width)
        far &= np.log(losses / past) > factor
        lasting &= np.log(smooth / past) > 0.5 * factor
    episodes: list[Trouble] = []
    for begin, end in _runs(_joined(far | lasting, width // 2)):
        episode = _episode(steps, losses, smooth, past, limit, begin, end)
        if episodes and _goes_on(episodes[-1], episode):
            first = episodes.pop()
            episode = replace(first, until=episode.until, size=max(first.size, episode.size))
        episodes.append(episode)
    return episodes


def _goes_on(first: Trouble, later: Trouble) -> bool:
    """Return whether a rise is the one before it: a slow one passes its limit several times."""
    return first.kind == later.kind == "rise" and first.until is not None and later.onset <= first.until


def _local_noise(losses: Floats, width: int) -> Floats:
    """Standard deviation of a point around its level, from the points before it, or the first ones.

    A diverging curve then does not raise its own limit; a multiple of the whole curve's noise bounds it, for
    the steep begin. Deviations from a wide median contain correlated noise, which differences would miss.
    """
    wide = 8 * width + 1
    deviations = np.abs(losses - median_filter(losses, 4 * width + 1, mode="reflect"))
    local = MAD_TO_SIGMA * median_filter(deviations, wide, mode="reflect", origin=wide // 2)
    overall = MAD_TO_SIGMA * float(np.median(deviations))
    sigma: Floats = np.maximum(np.minimum(local, 3.0 * overall), 0.5 * overall)
    return np.maximum(sigma, 1e-9)


def _episode(
    steps: Int64s, losses: Floats, smooth: Floats, past: Floats, limit: Floats, begin: int, end: int
) -> Trouble:
    rise = losses - past
    left = begin + int(np.argmax(rise[begin:end] > 0.5 * limit[begin:end]))
    soon = float(rise[left : min(end, left + SOON)].max())
    before = rise[max(0, left - JUST_BEFORE) : left]
    abrupt = float(rise[left]) >= ABRUPT_SHARE * soon
    abrupt &= not len(before) or float(np.median(before)) < CALM_SHARE * float(rise[left])
    onset = left if abrupt else _bend(losses, smooth, past, limit, left, end)
    size = float(rise[left:end].max() / max(abs(past[left]), 1e-9))
    until = None if end >= len(steps) else int(steps[end - 1])
    return Trouble("jump" if abrupt else "rise", int(steps[onset]), until, size, int(steps[left]))


def _bend(losses: Floats, smooth: Floats, past: Floats, limit: Floats, left: int, end: int) -> int:
    """Return where a rise begins that leaves the noise at the point `left`: at the bend of the curve before
    it.

    `smooth`: the running median, float64[n]. The fall of a training loss is a bend, too: only points that
    are at the lowest level already are searched.
    """
    near = 0.1 * limit[:left]
    low = np.flatnonzero(smooth[:left] - past[:left] <= near)
    settled = np.flatnonzero(smooth[:left] - smooth[: left + 1].min() <= near)
    # The rise goes on past `left` for about as long as it took to get there.
    took = max(left - int(low[-1]) if len(low) else left, window_of(len(losses)))
    begin = max(int(settled[0]) if len(settled) else 0, left - 4 * took, left - MAX_SEARCHED)
    bend = slope_change(losses[begin : min(end, left + took)])
    return left if bend is None else min(left, begin + bend[0])


def _joined(marked: NDArray[np.bool_], gap: int) -> NDArray[np.bool_]:
    """Fill gaps of at most `gap` points."""
    filled = marked.copy()
    runs = _runs(marked)
    for (_, end), (begin, _) in zip(runs, runs[1:], strict=False):
        if begin - end <= gap:
            filled[end:begin] = True
    return filled


def _runs(marked: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
