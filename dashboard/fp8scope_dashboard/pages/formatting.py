"""Format numbers, counts and times for display. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from statistics import median

from fp8scope_dashboard.text.numbers import MINUS, THIN
from fp8scope_dashboard.text.ticks import power_of_ten

# Earlier versions have stored `1.31x [1.29, 1.33]`, and differences of any loss in nats.
_FACTOR = re.compile(r"(\d\.\d\d)x\b")
_NATS = re.compile(r"(?<=\d) nats\b")
_BOUNDS = re.compile(r"\[(-?\d+\.\d+), (-?\d+\.\d+)\]")
_PER_CENT = re.compile(r"(\d) ?%(?![0-9A-Fa-f]{2})")
_THOUSANDS = re.compile(r"\b\d{1,3}(?:,\d{3})+\b")
# Before a number, and not inside a word, a date or a range.
_HYPHEN = re.compile(r"(?<![\w.\-])-(?=\d)")
# Larger numbers are written with a power of ten: people count few groups of digits.
GROUPED_UP_TO = 10**9
NOTHING = "\N{EN DASH}"
# In per cent: smaller differences of equal numbers come from rounding.
ROUNDING = 1e-9
# Columns: smaller numbers, or a wider range, are written with exponents; longer decimals nobody reads.
SMALL = 1e-3
WIDEST_COLUMN = 1e6
MAX_DECIMALS = 6


def number(value: float | None, digits: int = 4) -> str:
    """A measured value with `digits` significant digits: 2.314, 1.23×10⁻⁵, NaN, an en dash for None."""
    if value is None:
        return NOTHING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+∞" if value > 0 else f"{MINUS}∞"
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= GROUPED_UP_TO):
        mantissa, _, exponent = f"{value:.{max(digits - 2, 1)}e}".partition("e")
        text = f"{mantissa}×{power_of_ten(int(exponent))}"
    elif size >= 10**digits:
        text = f"{value:,.0f}".replace(",", THIN)
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def aligned(values: Sequence[float | None], digits: int = 4) -> list[str]:
    """The values of a column with equal decimals, so that their digits stand below each other.

    The decimals give the median `digits` significant digits. Values that are far from each other, very small
    or very large have an exponent each, and equal digits before it.
    """
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value != 0]
    if not sizes:
        return [number(value) for value in values]
    low, high = min(sizes), max(sizes)
    if high < SMALL or high >= GROUPED_UP_TO or high / low > WIDEST_COLUMN:
        return [_with_exponent(value, digits) for value in values]
    needed = max(digits - 1 - _magnitude(median(sizes)), -_magnitude(low))
    decimals = min(max(needed, 0), MAX_DECIMALS)
    return [_fixed(value, decimals) for value in values]


def aligned_differences(values: Sequence[tuple[float | None, str]]) -> list[str]:
    """The signed differences of a column with equal decimals. Those in 'nats' are a column of their own."""
    numbers = aligned([value if unit == "nats" else None for value, unit in values], 3)
    sizes = [
        100.0 * abs(value)
        for value, unit in values
        if unit != "nats" and value is not None and math.isfinite(value) and 100.0 * abs(value) >= ROUNDING
    ]
    decimals = 3 if sizes and min(sizes) < 0.1 else 2
    texts = []
    for (value, unit), text in zip(values, numbers, strict=True):
        if value is None or not math.isfinite(value):
            texts.append(number(value))
        elif unit == "nats":
            texts.append(f"+{text}" if value > 0 else text)
        else:
            size = 100.0 * abs(value)
            sign = "±" if size < 0.5 * 10**-decimals else "+" if value > 0 else MINUS
            body = f"{size:,.{decimals}f}".replace(",", THIN)
            texts.append(f"{sign}{body}{THIN}%")
    return texts


def _magnitude(size: float) -> int:
    return math.floor(math.log10(size))


def _fixed(value: float | None, decimals: int) -> str:
    if value is None or not math.isfinite(value):
        return number(value)
    text = f"{value:,.{decimals}f}".replace(",", THIN)
    return text.replace("-", MINUS, 1)


def _with_exponent(value: float | None, digits: int) -> str:
    if value is None or not math.isfinite(value) or value == 0:
        return number(value)
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa}×{power_of_ten(int(exponent))}".replace("-", MINUS, 1)


def with_spread(value: float, spread: float | None) -> str:
    """A value and its standard deviation, which has two digits, with equal decimals: 2.60 ± 0.26."""
    if spread is None or not math.isfinite(spread):
        return number(value)
    if spread == 0 or not 1e-3 <= spread < abs(value) < GROUPED_UP_TO:
        return f"{number(value)} ± {number(spread, 2)}"
    decimals = max(0, 1 - math.floor(math.log10(spread)))
    texts = (f"{x:,.{decimals}f}".replace(",", THIN).replace("-", MINUS) for x in (value, spread))
    return " ± ".join(texts)


def written(sentence: str) -> str:
    """A stored sentence with its numbers as pages write them: `12 %` on one line, minus signs, `12 345`."""
    sentence = _FACTOR.sub(rf"\1{THIN}×", sentence)
    sentence = _BOUNDS.sub(r"(\1 to \2)", sentence)
    sentence = _NATS.sub("", sentence)
    sentence = _PER_CENT.sub(rf"\1{THIN}%", sentence)
    sentence = _THOUSANDS.sub(lambda match: match[0].replace(",", THIN), sentence)
    return _HYPHEN.sub(MINUS, sentence)


def percent(fraction: float | None, *, signed: bool = False) -> str:
    """A fraction as per cent: 0.25 %. `signed`: with a sign, for differences."""
    if fraction is None:
        return NOTHING
    if not math.isfinite(fraction):
        return number(fraction)
    size = abs(100.0 * fraction)
    if size < ROUNDING:
        size = fraction = 0.0
    # A rate that is not zero must not be rounded to zero.
    if 0 < size < 0.001:
        text = f"< 0.001{THIN}%"
        return text if not signed else f"{'+' if fraction > 0 else MINUS}{text}"
    digits = 3 if size < 0.1 else 2 if size < 10 else 1 if size < 1000 else 0
    sign = ("+" if fraction > 0 else MINUS if fraction < 0 else "±") if signed else ""
    if not signed and fraction < 0:
        sign = MINUS
    body = "0" if size == 0 else f"{size:.{digits}f}"
    return f"{sign}{body}{THIN}%"


def points(difference: float | None, *, signed: bool = False) -> str:
    """A difference of two shares in percentage points: 0.25 pp."""
    return percent(difference, signed=signed).replace("%", "pp")


def difference(value: float | None, unit: str, *, signed: bool = False) -> str:
    """A difference of losses: as per cent, or as a number where the loss is near 0 (`unit` is 'nats').

    The number has no unit: only the script knows whether its loss is in nats, or an error or a reward.
    """
    if unit != "nats" or value is None:
        return percent(value, signed=signed)
    sign = "+" if signed and value > 0 else ""
    return f"{sign}{number(value, 3)}"


def count(value: int | None) -> str:
    """A count in groups of three digits: 12 345."""
    return NOTHING if value is None else f"{value:,}".replace(",", THIN)


def compact(value: float | None) -> str:
    """A count in a short form: 950, 12.3k, 4.1M, 2.0G."""
    if value is None:
        return NOTHING
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 100 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def size(amount: float | None) -> str:
    """An amount of bytes: 100 bytes, 712 KiB, 1.6 MiB, 58.9 GiB."""
    if amount is None:
        return NOTHING
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            scaled = amount / scale
            return f"{scaled:.0f}{THIN}{unit}" if scaled >= 100 else f"{scaled:.1f}{THIN}{unit}"
    return f"{amount:.0f}{THIN}byte{'' if amount == 1 else 's'}"


def span(seconds: float | timedelta | None) -> str:
    """A duration in its two largest units: 45 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None:
        return NOTHING
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if seconds < 0:
        seconds = 0.0
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f}{THIN}s"
    whole = round(seconds)
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    parts: list[str] = []
    for name, size in units:
        amount, whole = divmod(whole, size)
        if amount:
            parts.append(f"{amount}{THIN}{name}")
        if len(parts) == 2 or (parts and not amount):
            break
    return " ".join(parts) or f"0{THIN}s"


def ago(moment: datetime | None, now: datetime) -> str:
    """The age of a moment in one unit: just now, 12 s ago, 5 min ago, 3 h ago, 2 d ago."""
    if moment is None:
        return "never"
    seconds = (now - moment).total_seconds()
    if seconds < 5:
        return "just now"
    for name, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{THIN}{name} ago"
    return f"{int(seconds)}{THIN}s ago"


def ordinal(value: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 11th, ..., 21st."""
    ending = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"{count(value)}{ending}"
