"""The values of a search: numbers, durations and moments. Pure functions."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

_SUFFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "%": 0.01}
_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?)([kmgb%]?)", re.IGNORECASE)
_UNITS: Final = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(min|s|m|h|d|w)", re.IGNORECASE)
# A hundred years: longer ones do not fit into the database's dates.
LONGEST: Final = timedelta(days=36_525)


class ValueProblem(ValueError):
    """A value that its field does not have; the message says what to write instead."""


def number_of(text: str) -> float:
    """A finite number: 2.5, 1e-4, 10k, 2.5M, 0.25%.

    Raises:
        ValueProblem: it is none.
    """
    match = _NUMBER.fullmatch(text)
    value = float(match[1]) * _SUFFIXES[match[2].lower()] if match else math.nan
    if not math.isfinite(value):
        raise ValueProblem("a number, such as 2.5, 1e-4 or 10k")
    return value


def whole_number_of(text: str) -> int:
    """A whole number that fits into 64 bits: 300, 10k.

    Raises:
        ValueProblem: it is none.
    """
    value = int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else number_of(text)
    if value != int(value) or abs(value) >= 2**63:
        raise ValueProblem("a whole number, such as 300 or 10k")
    return int(value)


def duration_of(text: str) -> timedelta:
    """A duration with units: 45s, 30min, 2h, 1d12h.

    Raises:
        ValueProblem: it is none, or longer than LONGEST.
    """
    parts = _DURATION.findall(text)
    if not parts or "".join(amount + unit for amount, unit in parts) != text:
        raise ValueProblem("a duration with its unit, such as 30min, 2h or 7d")
    seconds = sum(float(amount) * _UNITS[unit.lower()] for amount, unit in parts)
    if seconds > LONGEST.total_seconds():
        raise ValueProblem("a duration of at most 100 years")
    return timedelta(seconds=seconds)


def moment_of(text: str) -> tuple[datetime, datetime]:
    """The first and the last instant, in UTC, of a day or a minute: 2026-10-01, 2026-10-01T12:30.

    Raises:
        ValueProblem: it is none.
    """
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            begin = datetime.combine(date.fromisoformat(text), time(), UTC)
            return begin, begin + timedelta(days=1) - timedelta(microseconds=1)
        moment = datetime.fromisoformat(text) if re.match(r"\d{4}-\d\d-\d\dT", text) else None
        if moment is not None:
            begin = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
            length = timedelta(minutes=1) if re.search(r"T\d\d:\d\d$", text) else timedelta(seconds=1)
            return begin, begin + length - timedelta(microseconds=1)
    except (ValueError, OverflowError):
        pass
    raise ValueProblem("a date such as 2026-10-01 or 2026-10-01T12:30 (UTC), or an age: age<7d")
