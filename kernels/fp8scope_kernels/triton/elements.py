"""Operations of the Triton kernels on single elements: read, scale, round, classify.

Comparing and rounding work on the bit pattern of a float32 as an integer. Patterns of one sign are ordered as
their numbers, with NaN above Inf, and integer arithmetic gives the same bits on every GPU and in Triton's
interpreter. Only the product x*s and the rounding of subnormals use float32 arithmetic. Neither may be fused,
so kernels are launched with enable_fp_fusion=False.
"""

import triton
import triton.language as tl

_ABS = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)


@triton.jit  # type: ignore[untyped-decorator]
def load_wide(address: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Elements as float32, 0 outside. BF16 is passed as int16: the interpreter gets its subnormals wrong."""
    value = tl.load(address, mask=inside, other=0)
    if value.dtype == tl.int16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def finite_bits(x: tl.tensor) -> tl.tensor:
    """The bits of abs(x) where x is finite, else 0."""
    magnitude = x.to(tl.int32, bitcast=True) & _ABS
    return tl.where(magnitude < _INF, magnitude, 0)


@triton.jit  # type: ignore[untyped-decorator]
def round_to_code(
    magnitude: tl.tensor,
    LARGEST: tl.constexpr,
    NORMAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
) -> tl.tensor:
    """Round the bits of abs(x*s), clamped to LARGEST, to the nearest code of the format, ties to even.

    The code has no sign. LARGEST and NORMAL are the bits of the clamp and of the format's smallest normal.
    """
    cut: tl.constexpr = 23 - MANTISSA
    magnitude = tl.minimum(magnitude, LARGEST)
    last = (magnitude >> cut) & 1
    normal = ((magnitude + ((1 << (cut - 1)) - 1) + last) >> cut) - ((127 - BIAS) << MANTISSA)
    # The last bit of this power of two has the value of the smallest subnormal: float32 rounds the sum.
    unit: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
    anchor = tl.full(magnitude.shape, unit, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - unit
    return tl.where(magnitude < NORMAL, subnormal, normal)


@triton.jit  # type: ignore[untyped-decorator]
def code_to_bfloat16(code: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """The bits of the bfloat16 with the code's value; exact for every format of up to 8 bits."""
    unit: tl.constexpr = (127 + 1 - BIAS - MANTISSA) << 23
    smallest = tl.full(code.shape, unit, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (code.to(tl.float32) * smallest).to(tl.int32, bitcast=True) >> 16
    return tl.where(code < (1 << MANTISSA), subnormal, (code << (7 - MANTISSA)) + ((127 - BIAS) << 7))


@triton.jit  # type: ignore[untyped-decorator]
def quantized_bits(
    x: tl.tensor,
    scaled: tl.tensor,
    MAX: tl.constexpr,
    NORMAL: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    BEYOND: tl.constexpr,
    NAN: tl.constexpr,
    SATURATE: tl.constexpr,
    PROPAGATE: tl.constexpr,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """(bits to store, code without sign) of x*s. NaN is stored as NAN, with the code 0x7F.

    More than M becomes BEYOND. PROPAGATE: an Inf of x becomes NaN. The test is on x, not on x*s: a finite x
    with an infinite product becomes M.
    """
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & _ABS
    # Unclamped values must not overflow the integers either; 4 M rounds to more than M in every case.
    largest: tl.constexpr = MAX if SATURATE else MAX + (2 << 23)
    code = round_to_code(magnitude, largest, NORMAL, MANTISSA, BIAS)
    number = magnitude <= _INF
    if PROPAGATE:
        number = number & ((x.to(tl.int32, bitcast=True) & _ABS) < _INF)
    if BYTES:
        stored = code if SATURATE else tl.where(code > MAX_CODE, BEYOND, code)
        stored = tl.where(number, stored, NAN)
        sign = (bits >> 24) & 0x80
    else:
        stored = code_to_bfloat16(code, MANTISSA, BIAS)
        if not SATURATE:
            stored = tl.where(code > MAX_CODE, BEYOND, stored)
        stored = tl.where(number, stored, 0x7FC0)
        sign = (bits >> 16) & 0x8000
    # As in reference.py: rounding by addition and subtraction flushes to +0, a cast keeps the sign.
    # Where NaN has the place of -0, zero has no sign.
    keep_sign: tl.constexpr = BYTES and SATURATE and NAN != 0x80
    stored = stored | (sign if keep_sign else tl.where(stored == 0, 0, sign))
    return stored.to(tl.uint8 if BYTES else tl.int16), tl.where(number, code, 0x7F)


@triton.jit  # type: ignore[untyped-decorator]
def small_counts(x: tl.tensor, code: tl.tensor, MANTISSA: tl.constexpr) -> tl.tensor:
    """Per element 1 for an underflow and 2^16 for a subnormal: one sum holds both counts of 2^15 elements."""
    small = tl.where(code == 0, (x != 0).to(tl.int32), 0x10000)
    return tl.where(code < (1 << MANTISSA), small, 0)


@triton.jit  # type: ignore[untyped-decorator]
def is_saturated(x: tl.tensor, scaled: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """1 where x is finite and abs(x*s) > `Format.limit`, else 0: int32. LIMIT is the limit as bits."""
    beyond = (scaled.to(tl.int32, bitcast=True) & _ABS) > LIMIT
    return (beyond & ((x.to(tl.int32, bitcast=True) & _ABS) < _INF)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def count_nonfinite(x: tl.tensor) -> tl.tensor:
    """1 where x is NaN or Inf, else 0: int32."""
    return ((x.to(tl.int32, bitcast=True) & _ABS) >= _INF).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def widened(small: tl.tensor) -> tl.tensor:
    """The sum of a tile's `small_counts` with 32 bits for each count: int64."""
    return (small & 0xFFFF).to(tl.int64) | ((small >> 16).to(tl.int64) << 32)


@triton.jit  # type: ignore[untyped-decorator]
def block_scale(
    amax: tl.tensor,
    LARGEST: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """`amax_to_block_scale` of float32 amax. MODE: 0 any float32, 1 powers of two, 2 MX with rule `floor`.

    LARGEST: M, or under MODE 2 the power of two at or below it.
    """
    if MODE == 2:
        smallest = tl.maximum(amax, MIN_SCALE).to(tl.int32, bitcast=True)
        amax_power = (smallest & _INF).to(tl.float32, bitcast=True)
        scale = tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax_power)
    else:
        scale = tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)
    scale = tl.minimum(tl.maximum(scale, MIN_SCALE), MAX_SCALE)
    if MODE == 1:
        scale = (scale.to(tl.int32, bitcast=True) & _INF).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, scale, 1.0)
