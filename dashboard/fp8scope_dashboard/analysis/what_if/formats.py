"""The ranges of the number formats. A test compares them with those of the kernels.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022); OCP Microscaling Formats 1.0 (2023);
IEEE 754 for FP16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import frexp
from typing import Final


@dataclass(frozen=True)
class NumberFormat:
    """A small floating-point format: its largest finite value, and the exponents and bits below it."""

    name: str
    largest: float
    min_exponent: int
    mantissa_bits: int

    @property
    def max_exponent(self) -> int:
        """The exponent e of the largest value, which lies in [2^e, 2^(e+1))."""
        return frexp(self.largest)[1] - 1

    @property
    def smallest_normal(self) -> float:
        return float(2.0**self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        return float(2.0 ** (self.min_exponent - self.mantissa_bits))

    @property
    def flushed(self) -> float:
        """The largest value that becomes zero: half of the smallest subnormal (rounding to even)."""
        return self.smallest_subnormal / 2

    @property
    def limit(self) -> float:
        """The next float32 above the largest value; what exceeds it counts as saturated."""
        return self.largest + float(2.0 ** (self.max_exponent - 23))


E4M3: Final = NumberFormat("E4M3", 448.0, -6, 3)
E5M2: Final = NumberFormat("E5M2", 57344.0, -14, 2)
# AMD's older accelerators: one NaN, no -0, and one binade less for numbers than for codes of the OCP.
E4M3FNUZ: Final = NumberFormat("E4M3FNUZ", 240.0, -7, 3)
E5M2FNUZ: Final = NumberFormat("E5M2FNUZ", 57344.0, -15, 2)
E3M2: Final = NumberFormat("E3M2", 28.0, -2, 2)
E2M3: Final = NumberFormat("E2M3", 7.5, 0, 3)
E2M1: Final = NumberFormat("E2M1", 6.0, 0, 1)
FP16: Final = NumberFormat("FP16", 65504.0, -14, 10)

FORMATS: Final[Mapping[str, NumberFormat]] = {
    format.name.lower(): format for format in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E3M2, E2M3, E2M1, FP16)
}


def format_named(name: str) -> NumberFormat | None:
    """The format in any spelling; None for an unknown name."""
    return FORMATS.get(name.lower().removesuffix("fn"))
