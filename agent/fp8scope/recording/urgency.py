"""Decides which steps are sent at once instead of with the next batch.

The server's detectors decide; these bounds only bring them what they may decide on sooner. So they are wide,
cost microseconds, and a wrong one costs a message. `delivery.sender` bounds how many messages that is.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]

NUMEL, SATURATED, UNDERFLOW, NONFINITE = 0, 3, 4, 6
"""Columns of a step's statistics; see `fp8scope_kernels.statistics`, which needs torch."""

MAX_OVERFLOW = 0.0005
"""Share of saturated and non-finite elements of a tensor, half of what the server's rule asks for."""
MAX_UNDERFLOW = 0.4
"""Share of the elements of a tensor that become zero."""

LEVEL_POINTS = 50.0
"""A scalar's level and deviation are exponential averages over so many points."""
FIRST_POINTS = 10
"""Points before a scalar is judged."""
MAX_RISES = {"loss": 0.02, "grad_norm": 0.7}
"""Rise of the logarithm above its level that is suspicious, if it is also MAX_DEVIATIONS large."""
MAX_DEVIATIONS = 3.0
"""In mean absolute deviations of the logarithm."""
MAX_STREAK = 200
"""A bound that more steps exceed than keep is the usual state of this run after so many, and not urgent."""


class UsualLevel:
    """The usual level of one scalar, on a logarithmic scale."""

    __slots__ = ("_deviation", "_level", "_points", "_rise")

    def __init__(self, rise: float) -> None:
        self._rise = rise
        self._points = 0
        self._level = self._deviation = 0.0

    def is_exceeded(self, value: float) -> bool:
        """Return whether a value is far above the level.

        Then it enters it clipped. Values <= 0 are ignored.
        """
        if not 0.0 < value < math.inf:
            return False
        value = math.log(value)
        if self._points == 0:
            self._level = value
        limit = max(self._rise, MAX_DEVIATIONS * self._deviation)
        distance = value - self._level
        exceeds = self._points >= FIRST_POINTS and distance > limit
        weight = 1.0 / min(self._points + 1.0, LEVEL_POINTS)
        distance = min(distance, limit) if exceeds else distance
        self._level += weight * distance
        self._deviation += weight * (abs(distance) - self._deviation)
        self._points += 1
        return exceeds


class Urgency:
    """Recognises the steps of one writer that an alert may follow from."""

    def __init__(self) -> None:
        self._not_finite: set[str] = set()
        """The scalars whose last value was NaN or infinite."""
        self._levels = {name: UsualLevel(rise) for name, rise in MAX_RISES.items()}
        self._streaks = dict.fromkeys((*MAX_RISES, "range"), 0)

    def is_urgent(self, scalars: Mapping[str, float], statistics: Float64s) -> bool:
        """Return whether a scalar has become NaN or infinite, or a bound is exceeded.

        Call it once for each step, in order.

        Args:
            statistics: float64 [tensors, statistics], as in `records.Row`.
        """
        is_urgent = self.is_news(scalars)
        for name, level in self._levels.items():
            if name in scalars:
                is_urgent |= self._is_recent(name, level.is_exceeded(scalars[name]))
        return self._is_recent("range", exceeds_range(statistics)) or is_urgent

    def _is_recent(self, bound: str, exceeded: bool) -> bool:
        streak = self._streaks[bound] + (1 if exceeded else -1)
        self._streaks[bound] = min(max(streak, 0), 2 * MAX_STREAK)
        return exceeded and streak <= MAX_STREAK

    def is_news(self, scalars: Mapping[str, float]) -> bool:
        """Return whether a scalar is NaN or infinite that was finite, or unknown, the last time it was
        logged.

        A value that stays NaN is news only once.
        """
        # A sum is finite only if all values are. It takes a fraction of a microsecond.
        if math.isfinite(sum(scalars.values())):
            if self._not_finite:
                self._not_finite.difference_update(scalars)
            return False
        bad = {name for name, value in scalars.items() if not math.isfinite(value)}
        is_news = not bad <= self._not_finite
        self._not_finite = (self._not_finite - scalars.keys()) | bad
        return is_news


def exceeds_range(statistics: Float64s) -> bool:
    """Return whether too many elements of a tensor are clipped, not finite, or become zero."""
    if not statistics.size:
        return False
    numel = statistics[:, NUMEL]
    # NaN, an unknown count, compares false.
    over = statistics[:, SATURATED] > MAX_OVERFLOW * numel
    over |= statistics[:, NONFINITE] > MAX_OVERFLOW * numel
    over |= statistics[:, UNDERFLOW] > MAX_UNDERFLOW * numel
    return bool(over.any())
