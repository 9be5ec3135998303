// The random words of random_stream.py: Philox4x32-10, with as many counters in flight as the vectors hold.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t COUNTERS = 64;         // of a group, in the order of their words
constexpr int64_t WORDS = 4 * COUNTERS;  // of a group

// The words of one call: backend.py declares the same structure. With `groups`, several streams take turns: the number
// of each group in its stream, and after all these its rank in place of `rank`. `offset` is added to every word.
struct Draw {
  uint32_t key[2], call, rank, offset;
  const int64_t* groups;
  int64_t count;
};

// Lanes of 64 bits hold words in their lower halves. The upper halves are arbitrary.
typedef uint64_t Wide __attribute__((vector_size(VECTOR)));
constexpr int64_t LANES64 = VECTOR / sizeof(uint64_t);
constexpr int64_t FLIGHT = VECTOR == 64 ? 4 : 2;  // vectors that hide each other's latency; even

// The products of the lower halves. A vector product of 64 bits would take several times as long.
INLINED inline Wide product(const Wide& a, uint32_t factor) {
#if defined(__AVX512BW__)
  return (Wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(factor));
#elif defined(__x86_64__)
  return (Wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(factor));
#else
  return (a & 0xffffffff) * factor;
#endif
}

// The words of a group: word w of counter c at to[w * COUNTERS + c].
void draw_group(const Draw& draw, int64_t group, uint32_t* __restrict to) {
  const uint64_t first = uint64_t(draw.groups ? draw.groups[group] : group) * COUNTERS;
  const uint32_t rank = draw.groups ? uint32_t(draw.groups[draw.count + group]) : draw.rank;
  for (int64_t lane = 0; lane < COUNTERS; lane += FLIGHT * LANES64) {
    Wide a[FLIGHT], b[FLIGHT], c[FLIGHT], d[FLIGHT];
    // Vectors take turns: one has the even counters, the next the odd ones, so that their halves fit together.
    for (int64_t i = 0; i < FLIGHT; i++) {
      for (int64_t j = 0; j < LANES64; j++)
        a[i][j] = uint32_t(first) + lane + (i & ~int64_t(1)) * LANES64 + 2 * j + (i & 1);
      b[i] = Wide{} + (first >> 32), c[i] = Wide{} + draw.call, d[i] = Wide{} + rank;
    }
    uint32_t left_key = draw.key[0], right_key = draw.key[1];
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < FLIGHT; i++) {
        const Wide left = product(a[i], 0xD2511F53u), right = product(c[i], 0xCD9E8D57u);
        a[i] = right >> 32 ^ b[i] ^ uint64_t(left_key), b[i] = right;
        c[i] = left >> 32 ^ d[i] ^ uint64_t(right_key), d[i] = left;
      }
      left_key += 0x9E3779B9u, right_key += 0xBB67AE85u;
    }
    for (int64_t i = 0; i < FLIGHT; i += 2) {
      const auto store = [&](const Wide& even, const Wide& odd, int64_t word) {
        const Wide both = (even & 0xffffffff) | odd << 32;
        std::memcpy(to + word * COUNTERS + lane + i * LANES64, &both, sizeof both);
      };
      store(a[i], a[i + 1], 0), store(b[i], b[i + 1], 1), store(c[i], c[i + 1], 2), store(d[i], d[i + 1], 3);
    }
  }
}

// The words of elements [first, first + n), n <= BLOCK. Groups are drawn whole.
struct Words {
  uint32_t drawn[BLOCK + 2 * WORDS];

  const uint32_t* draw(const Draw& draw, int64_t first, int64_t n) {
    const int64_t group = first / WORDS;
    for (int64_t i = group; i * WORDS < first + n; i++) draw_group(draw, i, drawn + (i - group) * WORDS);
    if (draw.offset)
      for (int64_t i = first % WORDS; i < first % WORDS + n; i++) drawn[i] += draw.offset;
    return drawn + first % WORDS;
  }
};

// `condition ? yes : no` by masks: with branches to sink work into, the compiler uses no vectors.
INLINED inline uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -uint32_t(condition);
  return (yes & mask) | (no & ~mask);
}

// x * scale clamped and rounded at random, by the upper 24 bits of a word each; else as `cast`, which see. The value
// above is taken where the discarded part of the significand exceeds the word. Zero keeps its sign where it has one.
template <typename Out, bool Divide = false>
INLINED inline void cast_at_random(const auto* __restrict x, Out* __restrict q, const uint32_t* __restrict words,
                                   int64_t n, float scale, Rounding f) {
  const float smallest = f.shift * 0x1p-23f, steps = 1 / smallest;
  for (int64_t i = 0; i < n; i++) {
    const float wide = real(widen(x[i]));
    const uint32_t b = bits(Divide ? wide / scale : wide * scale), word = words[i] >> 8;
    const bool lost = (!Divide & ((b & ABS) > INF)) | ((bits(wide) & ABS) > f.accepted);
    const uint32_t clamped = std::min(b & ABS, f.max);
    // Above, integers: the significand's discarded bits against as many of the word. Below, multiples of the subnormal.
    const uint32_t rounded = clamped + ((1u << f.drop) - 1) - (word >> (24 - f.drop));
    const float multiple = real(std::min(clamped, f.normal)) * steps;
    const int32_t whole = int32_t(multiple);
    const uint32_t small = whole + (float(int32_t(word)) * 0x1p-24f < multiple - float(whole));
    const uint32_t sign = (Divide ? bits(wide) : b) & ~ABS;
    if constexpr (sizeof(Out) == 1) {
      const uint32_t code = choose(clamped < f.normal, small, (rounded >> f.drop) - f.rebias);
      const uint32_t signs = std::is_same_v<Out, Fnuz> ? choose(code != 0, sign, 0) : sign;
      q[i] = Out(choose(lost, f.nan, code) | signs >> 24);
    } else {
      const uint32_t value = bits(float(int32_t(small)) * smallest);
      q[i] = Out((choose(lost, 0x7fc00000, choose(clamped < f.normal, value, rounded & f.kept)) | sign) >> 16);
    }
  }
}

// As `quantize`, which see, rounded at random: x begins at element `first` of its tensor.
template <typename T, typename Out>
uint32_t quantize_at_random(const T* x, Out* q, int64_t first, int64_t n, float scale, const Format& f,
                            const Draw& draw, int wanted, Counts& c) {
  const Rounding rounding(f);
  uint32_t top = 0;
  Words words;
  for (int64_t start = 0; start < n; start += PIECE) {
    const int64_t size = std::min(PIECE, n - start);
    cast_at_random(x + start, q + start, words.draw(draw, first + start, size), size, scale, rounding);
    if (wanted & AMAX) {
      uint32_t peak = widen(largest(x + start, size));
      if (wanted & COUNTS ? !(real(peak) * scale <= f.limit) : peak >= INF)
        peak = inspect(x + start, size, scale, f.limit, c);
      top = std::max(top, peak);
    }
    if (wanted & COUNTS) count(x + start, q + start, size, f, c);
  }
  return top;
}

}  // namespace
