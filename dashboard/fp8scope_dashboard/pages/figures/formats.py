"""The ranges of the number formats. A test compares them with those of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class FormatRange:
    """The positive numbers of a format: largest finite, smallest normal, smallest subnormal."""

    name: str
    largest: float
    smallest_normal: float
    smallest_subnormal: float

    @property
    def flushed(self) -> float:
        """The largest value that becomes zero: half of the smallest subnormal (rounding to even)."""
        return self.smallest_subnormal / 2


# OCP 8-bit floating point specification (2023); IEEE 754 for FP16.
_RANGES: Final = (
    FormatRange("E4M3", 448.0, 2.0**-6, 2.0**-9),
    FormatRange("E5M2", 57344.0, 2.0**-14, 2.0**-16),
    FormatRange("FP16", 65504.0, 2.0**-14, 2.0**-24),
)
RANGES: Final[Mapping[str, FormatRange]] = {format.name.lower(): format for format in _RANGES}


def range_of(format: str) -> FormatRange | None:
    """The range of a format in any spelling; None for an unknown format."""
    return RANGES.get(format.lower().removesuffix("fn"))
