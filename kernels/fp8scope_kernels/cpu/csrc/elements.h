// Numbers as bit patterns, and the cast of a run of them: the innermost loops, which the compiler vectorises.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

// backend.py declares the same two structures.
struct Format {
  float max, limit, smallest_normal, smallest_subnormal;
  int32_t mantissa_bits, bias, nan, max_exponent;
  uint32_t accepted;  // the largest pattern without sign that does not become NaN: INF, or the one below
};
struct Counts {
  int64_t zeros, flushed, below, saturated, nonfinite, blocks;
  float smallest, median, largest;  // of the blocks' scales
};

// For functions called on every block: constants are loaded once, and a known length needs no remainder loop.
#define INLINED __attribute__((always_inline))

namespace {

constexpr int64_t BLOCK = 4096;
constexpr uint32_t ABS = 0x7fffffff;
constexpr uint32_t INF = 0x7f800000;

constexpr float TINY = 0x1p-126f;  // float32's smallest normal

uint32_t bits(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
float real(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

// The float32 pattern of an element; bfloat16 is its upper half.
uint32_t widen(uint16_t x) { return uint32_t(x) << 16; }
uint32_t widen(uint32_t x) { return x; }

// The float32 pattern of a number (uint32_t), or its bfloat16, rounded to nearest even (uint16_t).
template <typename Out> Out narrow(float x) {
  const uint32_t b = bits(x);
  if constexpr (sizeof(Out) == 4) return b;
  else return Out((b & ABS) > INF ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// A byte of a format with one NaN, in the place of -0. A type of its own, so that the cast to other formats does not
// ask for the sign of each zero.
enum class Fnuz : uint8_t {};
constexpr int32_t FNUZ_NAN = 0x80;

template <typename T> constexpr T SIGNLESS = T(~T(0)) >> 1;

// A format as the cast needs it. Passed by value, because a byte that is written may alias any object.
struct Rounding {
  int drop;
  uint32_t max, normal, half, rebias, kept, nan, accepted;
  float shift;  // its last bit has the value of the smallest subnormal, so that adding it rounds

  explicit Rounding(const Format& f)
      : drop(23 - f.mantissa_bits), max(bits(f.max)), normal(bits(f.smallest_normal)), half((1u << (drop - 1)) - 1),
        rebias(uint32_t(127 - f.bias) << f.mantissa_bits), kept(~0u << drop), nan(f.nan),
        accepted(f.accepted), shift(8388608.0f * f.smallest_subnormal) {}
};

// One scale for all elements, or one for each.
INLINED inline float scale_of(float scale, int64_t) { return scale; }
INLINED inline float scale_of(const float* scales, int64_t i) { return scales[i]; }

// x * scale clamped and rounded to nearest even: the FP8 byte (uint8_t or Fnuz), or the same number as bfloat16 (uint16_t).
// `OnX` compares x with f.accepted, which takes longer. Comparing the product does not distinguish an Inf from a finite
// x whose product overflows. `Divide`: x / scale, where the sign is that of x: Inf / Inf has none.
template <typename Out, bool OnX = false, bool Divide = false>
INLINED inline void cast(const auto* __restrict x, Out* __restrict q, int64_t n, const auto scales, Rounding f) {
  const uint32_t base = bits(f.shift);
  for (int64_t i = 0; i < n; i++) {
    const float wide = real(widen(x[i])), scale = scale_of(scales, i);
    const uint32_t b = bits(Divide ? wide / scale : wide * scale), magnitude = b & ABS;
    const bool lost = (OnX ? widen(x[i]) & ABS : magnitude) > f.accepted;
    const uint32_t clamped = std::min(magnitude, f.max);
    const float shifted = real(clamped) + f.shift;
    const uint32_t rounded = clamped + f.half + ((clamped >> f.drop) & 1);
    if constexpr (sizeof(Out) == 1) {
      const uint32_t code = clamped < f.normal ? bits(shifted) - base : (rounded >> f.drop) - f.rebias;
      const uint32_t sign = b >> 24 & 0x80;
      if constexpr (std::is_same_v<Out, Fnuz>) q[i] = Out((lost ? f.nan : code) | (code ? sign : 0));
      else q[i] = Out((lost ? f.nan : code) | sign);
    } else {
      const uint32_t value = clamped < f.normal ? bits(shifted - f.shift) : rounded & f.kept;
      // As in reference.py, a flushed value becomes +0.
      const uint32_t sign = (Divide ? bits(wide) : b) & ~ABS;
      q[i] = Out(((lost ? 0x7fc00000 : value) | (value ? sign : 0)) >> 16);
    }
  }
}

// Casts finite x again whose product may be Inf: they saturate, but a cast that accepts no Inf has written NaN.
template <typename Out>
void mend(const auto* x, Out* q, int64_t n, float scale, Rounding f) {
  f.accepted = INF;
  for (int64_t i = 0; i < n; i++)
    if ((widen(x[i]) & ABS) < INF) cast<Out>(x + i, q + i, 1, scale, f);
}

}  // namespace
