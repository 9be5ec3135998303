"""Round numbers for the ticks of an axis, and their labels."""

from __future__ import annotations

import math

MINUS = "\u2212"
# Ticks of whole numbers with smaller distances have all their digits.
WHOLE_BELOW = 1_000
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def ticks(low: float, high: float, logarithmic: bool = False, most: int = 5) -> list[float]:
    """Round numbers within [low, high]: multiples of 1, 2 or 5 times a power of ten, or powers of ten.

    Args:
        low, high: finite, low < high; positive if logarithmic.
        most: about how many.
    """
    if logarithmic:
        exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        stride = max(1, math.ceil(len(exponents) / most))
        return [10.0**exponent for exponent in exponents[::stride]]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough)
    # A little more, for bounds that are multiples themselves.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * i for i in range(first, last + 1)]


def tick_label(value: float, largest: float) -> str:
    """A tick as text; `largest` of its axis decides on thousands (k), millions (M) and billions (B)."""
    if value == 0:
        return "0"
    sign, size = (MINUS if value < 0 else ""), abs(value)
    for factor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if largest >= 10 * factor or (factor > 1e3 and largest >= factor):
            return f"{sign}{size / factor:.6g}{letter}" if largest < 1e15 else f"{sign}{_power(size)}"
    return f"{sign}{size:.6g}" if size >= 1e-4 else f"{sign}{_power(size)}"


def _power(size: float) -> str:
    """A number in scientific notation: 2·10⁻⁵."""
    exponent = math.floor(math.log10(size) + 1e-9)
    mantissa = f"{size / 10.0**exponent:.3g}"
    power = power_of_ten(exponent)
    return power if mantissa == "1" else f"{mantissa}·{power}"


def power_of_ten(exponent: int) -> str:
    """10⁻⁵ for -5."""
    return f"10{superscript(str(exponent))}"


def superscript(digits: str) -> str:
    """Raised digits: ⁻⁵ for -5."""
    return digits.translate(_SUPERSCRIPTS)
