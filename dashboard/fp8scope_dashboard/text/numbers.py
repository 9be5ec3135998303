"""Numbers: which can be computed with, how JSON holds those that are not finite, and how people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Losses and scores of a larger magnitude count as infinite, and denominators below its inverse as 0. Squares,
# products and ratios of the remaining values stay finite.
LARGEST: Final = 1e100
SMALLEST: Final = 1.0 / LARGEST

MINUS: Final = "\N{MINUS SIGN}"
THIN: Final = "\N{NARROW NO-BREAK SPACE}"

NON_FINITE: Final[Mapping[str, float]] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The strings of docs/wire.md for values that JSON has no number for."""


def usable(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where values are finite and small enough to be squared: bool of their shape."""
    # A comparison with NaN is false.
    return np.asarray(np.abs(values) <= LARGEST)


def json_number(value: float) -> float | str:
    """The value, or its name in NON_FINITE."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def percent(fraction: float) -> str:
    """A fraction as a percentage, with more digits the smaller it is."""
    size = abs(100.0 * fraction)
    digits = 3 if size < 0.1 else 2 if size < 10 else 1 if size < 1000 else 0
    return f"{100.0 * fraction:.{digits}f} %"


def percentage_points(difference: float) -> str:
    """A difference of two shares: 0.25 percentage points. It is not a percentage of either of them."""
    return f"{percent(difference).removesuffix(' %')} percentage points"


def level(probability: float) -> str:
    """A probability that people choose, such as the level of an interval: 95 %, 99.9 %, 0.1 %."""
    return f"{100.0 * probability:.3g} %"


def number(value: float) -> str:
    """Four significant digits, without an exponent where possible."""
    return f"{value:,.0f}" if abs(value) >= 10_000 and abs(value) < 1e15 else f"{value:.4g}"


def rounded(value: float, digits: int) -> str:
    """A finite number with at most 4 significant digits: `0.0123`, `1,580`, `3.1e-6`."""
    short = float(f"{value:.{digits}g}")
    if 1_000.0 <= abs(short) < 1e15:
        return f"{short:,.0f}"
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def count(number: int, noun: str) -> str:
    """`1 run`, `3 runs`, `1,403 runs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def about(estimate: float, noun: str) -> str:
    """An estimated number with at most three digits that count: `about 1,940 steps`, `about 1 seed`."""
    shown = rounded(estimate, 3)
    return f"about {shown} {noun}" if shown == "1" else f"about {shown} {noun}s"


def length_against(ratio: float) -> str:
    """Return how long something is that has `ratio` times the length of another, up to the word before that
    one.

    `5 times as long as`, `50 % longer than`, `20 % shorter than`, `10 % as long as`.
    """
    if ratio >= 1.995:
        return f"{rounded(ratio, 3)} times as long as"
    if ratio < 0.5:
        return f"{rounded(100.0 * ratio, 2)} % as long as"
    return f"{rounded(100.0 * abs(ratio - 1.0), 2)} % {'longer' if ratio > 1.0 else 'shorter'} than"


def as_factor(octaves: float) -> str:
    """The factor 2^octaves, with three significant digits or, from 10,000 on, as a power of two."""
    size = 2.0 ** min(octaves, 60.0)
    if size >= 1e4:
        return f"2^{octaves:.0f}"
    return f"{size:,.0f}" if size >= 999.5 else f"{size:.3g}"
