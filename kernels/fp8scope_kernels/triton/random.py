"""Stochastic rounding in Triton: the words of random_stream.py, and how they round single elements."""

import triton
import triton.language as tl

from fp8scope_kernels.triton.elements import code_to_bfloat16

_ABS = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)


@triton.jit  # type: ignore[untyped-decorator]
def random_words(stream: tl.tensor, rank: tl.tensor, counter: tl.tensor) -> tl.tensor:
    """The four words of each counter (int64), by Philox4x32-10, as uint32."""
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    call = tl.zeros_like(low) + tl.load(stream + 1).to(tl.uint32)
    return tl.philox(tl.load(stream), low, high, call, tl.zeros_like(low) + tl.full((), rank, tl.uint32))


@triton.jit  # type: ignore[untyped-decorator]
def bits_at_random(
    x: tl.tensor,
    scaled: tl.tensor,
    word: tl.tensor,
    MAX: tl.constexpr,
    NORMAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    PROPAGATE: tl.constexpr,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """(bits to store, code without sign) of x*s, clamped and rounded by the upper 24 bits of a random word.

    As `quantized_bits` otherwise, except that zero keeps its sign where the format has one.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & _ABS, MAX)
    chance = (word >> 8).to(tl.int32)
    cut: tl.constexpr = 23 - MANTISSA
    # The discarded bits of the significand against as many of the word.
    normal = ((magnitude + ((1 << cut) - 1) - (chance >> (24 - cut))) >> cut) - ((127 - BIAS) << MANTISSA)
    steps: tl.constexpr = (127 - 1 + BIAS + MANTISSA) << 23
    per_unit = tl.full(magnitude.shape, steps, tl.int32).to(tl.float32, bitcast=True)
    # Beyond the subnormals the value is not used; it must fit into an integer all the same.
    below = tl.minimum(magnitude, NORMAL).to(tl.float32, bitcast=True) * per_unit
    whole = below.to(tl.int32)
    part = below - whole.to(tl.float32)
    subnormal = whole + (chance.to(tl.float32) * 5.9604644775390625e-08 < part).to(tl.int32)
    code = tl.where(magnitude < NORMAL, subnormal, normal)
    number = (bits & _ABS) <= _INF
    if PROPAGATE:
        number = number & ((x.to(tl.int32, bitcast=True) & _ABS) < _INF)
    else:
        number = number & ((x.to(tl.int32, bitcast=True) & _ABS) <= _INF)
    if BYTES:
        stored = tl.where(number, code, NAN)
        sign = (bits >> 24) & 0x80
        # Where NaN has the place of -0, zero has no sign.
        if NAN == 0x80:
            sign = tl.where(stored == 0, 0, sign)
    else:
        stored = tl.where(number, code_to_bfloat16(code, MANTISSA, BIAS), 0x7FC0)
        sign = (bits >> 16) & 0x8000
    return (stored | sign).to(tl.uint8 if BYTES else tl.int16), tl.where(number, code, 0x7F)
