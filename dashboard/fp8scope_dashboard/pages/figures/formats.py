"""What the number formats can hold. The kernels have the same numbers; a test compares them."""

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
        """What is as small becomes zero: half of the smallest subnormal, which rounds to even."""
        return self.smallest_subnormal / 2


# OCP 8-bit floating point specification (2023); IEEE 754 for FP16.
_RANGES: Final = (
    FormatRange("E4M3", 448.0, 2.0**-6, 2.0**-9),
    FormatRange("E5M2", 57344.0, 2.0**-14, 2.0**-16),
    FormatRange("FP16", 65504.0, 2.0**-14, 2.0**-24),
)
RANGES: Final[Mapping[str, FormatRange]] = {each.name.lower(): each for each in _RANGES}


def range_of(format: str) -> FormatRange | None:
    """The range of a catalogue's format, however it is spelled; None for one that is not known, or none."""
    return RANGES.get(format.lower().removesuffix("fn"))
