"""An anytime-valid confidence sequence for the level of a difference at the end of a curve.

Looking at a running training many times must not make a wrong verdict likely. The level is estimated on
windows that start on a *fixed geometric grid*: start i is at a fixed point of the curve, whenever one looks,
and its window grows with the run until start i + 1 takes over. Window i has the probability of error

    alpha_i = (alpha / 4) / ((i + 1) (i + 2)),   with sum over i of alpha_i = alpha / 4,

and within it the mean of m points is bounded at all m at once by Robbins' (1970) normal mixture,

    z_m = sqrt((1 + 1/(m r)) log((1 + m r) / alpha_i^2)),   mean -+ z_m sigma / sqrt(m),

where r is chosen so that the bound is tightest at the size at which the window is used, and sigma / sqrt(m)
is the error of the mean of correlated points (`noise`). With an estimated variance this is the asymptotic
confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (2024). Short curves are far from the
asymptotic case, so z_m is replaced by the quantile of Student's t of the same probability, with the degrees
of freedom of the variance's estimate. A share of alpha is for the end of the run, one planned look, and
another for a harm that has begun (`onsets.process`), so that alpha is the bound of a verdict as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from fp8scope_dashboard.analysis.losses.noise import Sums, newey_west_lags, noise_of
from fp8scope_dashboard.statistics.arrays import Floats
from fp8scope_dashboard.statistics.student import quantiles_at

Indices = NDArray[np.int64]

# The first window begins at this share of the first COMMON_POINTS points.
COMMON_POINTS = 20
FIRST_START = 0.7
WINDOW_POINTS = 5
# The shares of alpha that are for the looks before the end of a run and for its end: one look that is planned
# is cheaper than any number. `onsets.process` has the rest.
SHARE_OF_LOOKS, SHARE_OF_END = 0.25, 0.5


@dataclass(frozen=True)
class Looks:
    """The confidence sequence at J looks.

    Attributes:
        stop: int64[J], number of points seen; start: int64[J], index of the window's first point.
        level: float64[J], mean over the window; half: float64[J], half-width of its interval.
        error: float64[J], standard error of the level, without the price of looking.
    """

    start: Indices
    stop: Indices
    level: Floats
    half: Floats
    error: Floats


def mixture_quantile(points: Floats, tuned: Floats, alpha: Floats) -> Floats:
    """z_m of the normal-mixture confidence sequence for m `points`; tightest at `tuned` points.

    All float64 of one shape. The module's docstring has the source.
    """
    log = -2.0 * np.log(alpha)
    rate = (log + np.log(log) + 1.0) / tuned
    scaled = points * rate
    return np.asarray(np.sqrt((1.0 + 1.0 / scaled) * (np.log1p(scaled) + log)))


def windows(x: Floats, stop: Indices, fraction: float) -> tuple[Indices, Indices]:
    """The window of each look at x[:stop]: its first index, and its number on the grid.

    A window covers at least `fraction` of the range from x[0], and at least WINDOW_POINTS points.
    """
    unit = max(FIRST_START * float(x[min(COMMON_POINTS, len(x)) - 1] - x[0]), np.finfo(np.float64).tiny)
    reach = (1.0 - fraction) * (x[stop - 1] - x[0]) / unit
    ratio = -np.log1p(-fraction)
    with np.errstate(divide="ignore"):
        number = np.floor(np.log(np.maximum(reach, 1.0)) / ratio + 1e-9).astype(np.int64)
    begin = x[0] + unit * np.exp(ratio * number)
    start = np.minimum(np.searchsorted(x, begin, side="left"), stop - WINDOW_POINTS)
    return np.maximum(start, 0), number


def sequence(
    x: Floats,
    difference: Floats,
    stop: Indices,
    *,
    alpha: float,
    fraction: float,
    ended: bool = False,
) -> Looks:
    """The confidence sequence of a difference float64[n] at looks after `stop` points each (ascending).

    Any number of looks during the run have the probability of error SHARE_OF_LOOKS alpha, and its end has
    SHARE_OF_END alpha: the last look of a run that has `ended` is a plain interval.

    A difference that grows looks like noise that wanders, and stays undecided here: `harm` finds it.
    """
    start, number = windows(x, stop, fraction)
    sums = Sums(difference, newey_west_lags(int(stop.max(initial=1))) + 1)
    level = sums.means(start, stop)
    points = (stop - start).astype(np.float64)
    tuned = np.maximum(fraction * stop, WINDOW_POINTS)
    spent = SHARE_OF_LOOKS * alpha / ((number + 1.0) * (number + 2.0))
    price = mixture_quantile(points, tuned, spent)
    if ended:
        price[-1] = -scipy.special.ndtri(SHARE_OF_END * alpha / 2.0)
    noise = noise_of(sums, start, stop)
    half = quantiles_at(price, noise.freedom) * np.sqrt(noise.variance) + noise.drift
    return Looks(start, stop, level, half, np.sqrt(noise.variance))


def last_point(difference: Floats) -> Looks:
    """One look at the last point of a difference, float64[n], that is too short to show its noise.

    No bound is known: half width and error are infinite.
    """
    end = np.array([len(difference)])
    unknown = np.array([np.inf])
    return Looks(end - 1, end, difference[-1:], unknown, unknown)
