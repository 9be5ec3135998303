"""Decides which steps are sent at once instead of with the next batch."""

import math
from collections.abc import Mapping


class Urgency:
    """Recognises the steps of one writer in which a scalar becomes NaN or infinite."""

    def __init__(self) -> None:
        self._not_finite: set[str] = set()
        """The scalars whose last value was NaN or infinite."""

    def is_news(self, scalars: Mapping[str, float]) -> bool:
        """Whether a scalar is NaN or infinite that was finite, or unknown, the last time it was logged.

        Call it once for each step, in order. A value that stays NaN is news only once.
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
