"""The number formats, as immutable values.

Every property of a format follows from its exponent width, mantissa width, exponent bias and special values.
Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), the OCP Microscaling Formats
specification 1.0 (2023), and for the formats of AMD's CDNA 3 Noune et al., "8-bit Numerical Formats for Deep
Neural Networks" (2022).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Specials = Literal["ieee", "nan", "negative_zero", "none"]

Encoding = Literal["ocp", "fnuz"]
"""The two pairs of FP8 formats: E4M3 and E5M2 of the OCP, and E4M3FNUZ and E5M2FNUZ (finite, one NaN, an
unsigned zero) of AMD's CDNA 3."""
ENCODINGS: tuple[Encoding, ...] = ("ocp", "fnuz")


@dataclass(frozen=True, kw_only=True)
class Format:
    """A small floating-point format.

    `specials` says which bit patterns are not finite numbers: `ieee` reserves the largest exponent for Inf
    and NaN, `nan` reserves only the all-ones pattern (of each sign) for NaN, `negative_zero` has one NaN in
    the place of -0, `none` reserves nothing. A format without mantissa bits (E8M0, the scales of MX formats)
    also has no sign, no zero and no subnormals.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    dtype: torch.dtype | None = None
    """The torch dtype with one such number per element, or None if torch has none."""

    @property
    def signed(self) -> bool:
        """Return whether it has a sign bit: E8M0, a format of scales, has none."""
        return self.mantissa_bits > 0

    @property
    def bits(self) -> int:
        """Width in bits, sign included."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def has_infinity(self) -> bool:
        """Return whether the largest exponent holds infinities and NaN, as in IEEE 754 (E5M2)."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """Return whether NaN has a code; the formats of 6 and 4 bits have none."""
        return self.specials != "none"

    @property
    def has_negative_zero(self) -> bool:
        """Return whether zero has a sign. Where it has none, what rounds to zero becomes +0."""
        return self.signed and self.specials != "negative_zero"

    @property
    def nan_code(self) -> int | None:
        """The bit pattern of NaN as torch writes it: all ones below the sign, or that of -0."""
        if not self.has_nan:
            return None
        negative_zero = 1 << (self.bits - self.signed)
        return negative_zero if self.specials == "negative_zero" else negative_zero - 1

    @property
    def has_subnormals(self) -> bool:
        return self.mantissa_bits > 0

    @property
    def max_exponent(self) -> int:
        """The exponent e of the largest finite value, which lies in [2^e, 2^(e+1))."""
        exponent = (1 << self.exponent_bits) - 1 - self.bias
        # Without mantissa bits NaN takes the whole largest exponent.
        taken = self.specials == "ieee" or (self.specials == "nan" and self.mantissa_bits == 0)
        return exponent - int(taken)

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value."""
        return int(self.has_subnormals) - self.bias

    @property
    def max(self) -> float:
        """The largest finite value, M in the documentation."""
        last = (1 << self.mantissa_bits) - 1
        if self.specials == "nan" and self.mantissa_bits:
            last -= 1
        return float(2.0**self.max_exponent) * (1 + last * self.epsilon)

    @property
    def limit(self) -> float:
        """The next float32 above M. An element counts as saturated if abs(x*s) exceeds this limit.

        s is M / amax rounded to float32, which increases it by at most a factor of 1 + 2^-24. So amax*s is at
        most M (1 + 2^-24), less than one float32 unit above M, and rounding the product gives at most this
        limit. An element that exceeds M only through these two roundings becomes M without loss.
        """
        return self.max + float(2.0 ** (self.max_exponent - 23))

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with an implicit leading 1."""
        return float(2.0**self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; without subnormals it is the smallest normal value."""
        return float(2.0 ** (self.min_exponent - self.mantissa_bits))

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger value."""
        return float(2.0**-self.mantissa_bits)

    def decode(self, code: int) -> float:
        """Return the value of a bit pattern, 0 <= code < 2**bits. Raises ValueError outside this range."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{self.name} has codes 0 to {(1 << self.bits) - 1}, got {code}.")
        if self.specials == "negative_zero" and code == self.nan_code:
            return float("nan")
        sign = -1.0 if code >> (self.exponent_bits + self.mantissa_bits) else 1.0
        all_ones = (1 << self.mantissa_bits) - 1
        mantissa = code & all_ones
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        if exponent == (1 << self.exponent_bits) - 1:
            if self.specials == "ieee":
                return float("nan") if mantissa else sign * float("inf")
            if self.specials == "nan" and mantissa == all_ones:
                return float("nan")
        if exponent == 0 and self.has_subnormals:
            return sign * mantissa * self.smallest_subnormal
        return sign * float(2.0 ** (exponent - self.bias)) * (1 + mantissa * self.epsilon)

    @cached_property
    def table(self) -> Tensor:
        """All values in the order of their bit patterns: float32 [2**bits], on the CPU."""
        values = [self.decode(code) for code in range(1 << self.bits)]
        # The tensor is cached: created in inference mode, autograd would refuse it later.
        with torch.inference_mode(False):
            return torch.tensor(values, dtype=torch.float32, device="cpu")


E4M3 = Format(
    name="E4M3", exponent_bits=4, mantissa_bits=3, bias=7, specials="nan", dtype=torch.float8_e4m3fn
)
E5M2 = Format(
    name="E5M2", exponent_bits=5, mantissa_bits=2, bias=15, specials="ieee", dtype=torch.float8_e5m2
)
E4M3FNUZ = Format(
    name="E4M3FNUZ",
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    specials="negative_zero",
    dtype=torch.float8_e4m3fnuz,
)
E5M2FNUZ = Format(
    name="E5M2FNUZ",
    exponent_bits=5,
    mantissa_bits=2,
    bias=16,
    specials="negative_zero",
    dtype=torch.float8_e5m2fnuz,
)
E3M2 = Format(name="E3M2", exponent_bits=3, mantissa_bits=2, bias=3, specials="none")
E2M3 = Format(name="E2M3", exponent_bits=2, mantissa_bits=3, bias=1, specials="none")
E2M1 = Format(name="E2M1", exponent_bits=2, mantissa_bits=1, bias=1, specials="none")
E8M0 = Format(
    name="E8M0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    specials="nan",
    dtype=getattr(torch, "float8_e8m0fnu", None),
)
"""The format of MX scales: powers of two from 2^-127 to 2^127. It is not for data."""

DATA_FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E3M2, E2M3, E2M1)}
FORMATS: dict[str, Format] = {**DATA_FORMATS, E8M0.name: E8M0}

_FNUZ_OF: dict[str, Format] = {E4M3.name: E4M3FNUZ, E5M2.name: E5M2FNUZ}
_OCP_OF: dict[str, Format] = {fnuz.name: FORMATS[name] for name, fnuz in _FNUZ_OF.items()}


def in_encoding(format: Format, encoding: Encoding) -> Format:
    """The format of the same widths in this encoding; the format itself where there is none."""
    return (_FNUZ_OF if encoding == "fnuz" else _OCP_OF).get(format.name, format)
