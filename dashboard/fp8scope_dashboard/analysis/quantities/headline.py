"""Speed and cost in tokens, combined into the speed to the same loss. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, hypot, log, log1p

Interval = tuple[float, float]


@dataclass(frozen=True)
class Net:
    """The factor by which the same loss is reached faster."""

    value: float
    interval: Interval | None


def net_speed(ratio: float, ratio_interval: Interval | None, more: float, more_interval: Interval) -> Net:
    """The throughput ratio divided by 1 + the share of additional tokens.

    The interval of the difference of the logarithms is Zou & Donner's (2008, MOVER): with a in [a1, a2] and b
    in [b1, b2], a - b is in a - b - hypot(a - a1, b2 - b) to a - b + hypot(a2 - a, b - b1). Timing and loss
    are independent. A throughput without an interval did not vary.
    """
    a, b = log(ratio), log1p(more)
    low, high = ratio_interval or (ratio, ratio)
    first, last = more_interval
    below, above = hypot(a - log(low), log1p(last) - b), hypot(log(high) - a, b - log1p(first))
    return Net(exp(a - b), (exp(a - b - below), exp(a - b + above)))
