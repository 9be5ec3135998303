"""Text for a terminal: names that are data, their width, numbers, and small lines.

Names come from runs, so that they may contain anything. No control character of them reaches a terminal.
"""

import math
import unicodedata
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8scope.client.plain_text import JOINER, SELECTORS

ELLIPSIS: Final = "…"
BARS: Final = "▁▂▃▄▅▆▇█"
MIN_WIDTH: Final = 4
NOTHING: Final = "–"


def width_of(text: str) -> int:
    """The columns that a printable text takes: two for wide characters, none for combining ones."""
    width, joined = 0, False
    for character in text:
        if joined or ord(character) in SELECTORS or unicodedata.category(character) in ("Mn", "Me"):
            joined = False
        elif character == JOINER:
            joined = True
        else:
            width += 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
    return width


def cut(text: str, width: int) -> str:
    """The text in at most `width` columns; a longer one loses its middle, because ends tell names apart."""
    if width_of(text) <= width:
        return text
    if width < MIN_WIDTH:
        return _beginning(text, width)
    tail = (width - 1) // 2
    end = _beginning(text[::-1], tail)[::-1]
    # A mark cannot stand without the letter that it belongs to.
    while end and width_of(end[0]) == 0:
        end = end[1:]
    return f"{_beginning(text, width - 1 - width_of(end))}{ELLIPSIS}{end}"


def _beginning(text: str, width: int) -> str:
    """As many characters as fit."""
    fitting = ""
    for character in text:
        if width_of(fitting + character) > width:
            break
        fitting += character
    return fitting


def number(value: float | None) -> str:
    """A measured value with four digits; an en dash for None."""
    if value is None:
        return NOTHING
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def difference(value: float | None, unit: str, *, signed: bool = True) -> str:
    """A difference of losses: in per cent, or in nats."""
    if value is None:
        return NOTHING
    sign = "+" if signed else ""
    return f"{100.0 * value:{sign}.3g} %" if unit == "relative" else f"{value:{sign}.3g} {unit}"


def count(value: int | None) -> str:
    """A whole number with commas; an en dash for None."""
    return NOTHING if value is None else f"{value:,}"


def sparkline(values: NDArray[np.float64], width: int) -> str:
    """The finite values as bars in at most `width` columns, each the mean of its part; a space for none.

    The first tenth, where a loss falls most, does not set the range.
    """
    if not len(values):
        return ""
    parts = np.array_split(values, min(width, len(values)))
    means = np.array(
        [part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts]
    )
    settled = means[len(means) // 10 :]
    finite = settled[np.isfinite(settled)]
    if not len(finite):
        return ""
    low, span = float(finite.min()), float(finite.max() - finite.min()) or 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        levels = np.clip((means - low) / span, 0.0, 1.0) * (len(BARS) - 1)
    return "".join(" " if np.isnan(level) else BARS[round(level)] for level in levels.tolist())
