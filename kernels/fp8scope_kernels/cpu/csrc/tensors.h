// One scale for a whole tensor. Processes pieces that fit the first-level cache: casts a piece, then counts in its
// output, of which more elements fit into a vector than of float32.

namespace {

constexpr int COUNTS = 1, AMAX = 2;
constexpr int64_t PIECE = 2048;

// The multiplier of reference.py: `top` / amax within float32's normal range, perhaps as a power of two.
float choose_scale(float amax, float top, bool power_of_two, float otherwise) {
  if (!(amax > 0 && amax < real(INF))) return otherwise;
  const float scale = std::min(std::max(top / amax, TINY), real(0x7f7fffff));
  return power_of_two ? real(bits(scale) & INF) : scale;
}

// `wanted`: COUNTS + AMAX. `bound`: an upper bound of the finite elements' amax; Inf if it is not known.
template <typename T, typename Out>
uint32_t quantize(const T* x, Out* q, int64_t n, float scale, const Format& f, int wanted, float bound, Counts& c) {
  int64_t zeros = 0, flushed = 0, below = 0, saturated = 0, nonfinite = 0;
  uint32_t top = 0;
  const Rounding rounding(f);
  // Rare: the product of a finite element may be Inf. Without the peak of each piece, every x is tested.
  const bool overflowing = f.accepted < INF && scale > 1 && !(bound * scale < real(INF));
  const bool blind = overflowing && !(wanted & AMAX) && scale < real(INF);
  for (int64_t start = 0; start < n; start += PIECE) {
    const int64_t size = std::min(PIECE, n - start);
    if (blind) cast<Out, true>(x + start, q + start, size, scale, rounding);
    else cast<Out>(x + start, q + start, size, scale, rounding);
    Counts part = {};
    bool suspect = overflowing && !blind;
    if (wanted & AMAX) {
      uint32_t peak = widen(largest(x + start, size));
      suspect &= !(real(peak) * scale < real(INF));
      // Rare: something is not finite, or saturates. Count it in a second pass while the piece is in the cache.
      if (wanted & COUNTS ? !(real(peak) * scale <= f.limit) : peak >= INF)
        peak = inspect(x + start, size, scale, f.limit, part);
      top = std::max(top, peak);
    }
    if (suspect) mend(x + start, q + start, size, scale, rounding);
    if (wanted & COUNTS) count(x + start, q + start, size, f, part);
    zeros += part.zeros, flushed += part.flushed, below += part.below;
    saturated += part.saturated, nonfinite += part.nonfinite;
  }
  c.zeros = zeros, c.flushed = flushed, c.below = below;
  if (wanted & AMAX) c.saturated = saturated, c.nonfinite = nonfinite;
  return top;
}

template <typename T> uint32_t measure(const T* x, int64_t n) {
  uint32_t top = 0;
  for (int64_t start = 0; start < n; start += 16 * BLOCK)
    top = std::max(top, widen(largest(x + start, std::min(16 * BLOCK, n - start))));
  return top;
}

// The dtypes that `observe` reads; plain_tensors.py has the same order.
enum Dtype { BFLOAT16, FLOAT16, FLOAT32, FLOAT64 };

// An IEEE 754 half as a float32, exactly; finite.
float half(uint16_t x) {
  const uint32_t exponent = x >> 10, mantissa = x & 0x3ff;
  return exponent ? real((exponent + 112) << 23 | mantissa << 13) : float(mantissa) * 0x1p-24f;
}

struct Observed {
  float amax;
  int64_t nonfinite;
};

// Elements of a pattern from `beyond` on are not finite, without their sign; the largest of the others, and how
// many they are not. The second look is rare: something is not finite.
template <typename T> T observe(const T* x, int64_t n, T beyond, int threads, int64_t& nonfinite) {
  constexpr int64_t PART = 16 * BLOCK;
  T top = 0;
  int taken = 0;
  nonfinite = 0;
  share_range(n, PART, threads, [&](int64_t first, int64_t last) {
    T highest = 0;
    int64_t bad = 0;
    for (int64_t start = first; start < last; start += PART) {
      const int64_t size = std::min(PART, last - start);
      T peak = largest(x + start, size);
      if (peak >= beyond) {
        peak = 0;
        for (int64_t i = start; i < start + size; i++) {
          const T magnitude = x[i] & SIGNLESS<T>;
          bad += magnitude >= beyond;
          peak = std::max(peak, magnitude < beyond ? magnitude : T(0));
        }
      }
      highest = std::max(highest, peak);
    }
    const Turn turn(taken);
    top = std::max(top, highest);
    nonfinite += bad;
  });
  return top;
}

// Of n elements of this dtype. Float64 is taken as float32, so that what rounds to Inf is not finite.
Observed observe(const void* x, int64_t n, int dtype, int threads) {
  Observed seen = {};
  if (dtype == FLOAT32) {
    seen.amax = real(observe((const uint32_t*)x, n, INF, threads, seen.nonfinite));
  } else if (dtype == FLOAT64) {
    const uint64_t beyond = 0x47effffff0000000;  // 2^128 - 2^103: half way from float32's largest to the next
    const uint64_t top = observe((const uint64_t*)x, n, beyond, threads, seen.nonfinite);
    double wide;
    std::memcpy(&wide, &top, sizeof wide);
    seen.amax = float(wide);
  } else {
    const uint16_t beyond = dtype == FLOAT16 ? 0x7c00 : 0x7f80;
    const uint16_t top = observe((const uint16_t*)x, n, beyond, threads, seen.nonfinite);
    seen.amax = dtype == FLOAT16 ? half(top) : real(widen(top));
  }
  return seen;
}

// The sum of n squares, in double over short runs of float32: their lanes lose nothing that a norm would show.
double squares(const float* x, int64_t n) {
  typedef float V __attribute__((vector_size(VECTOR)));
  constexpr int64_t W = VECTOR / sizeof(float), RUN = 32 * W;
  double sum = 0;
  int64_t i = 0;
  for (; i + RUN <= n; i += RUN) {
    V lanes[4] = {};
    for (int64_t j = i; j < i + RUN; j += 4 * W)
      for (int k = 0; k < 4; k++) {
        V v;
        std::memcpy(&v, x + j + k * W, sizeof v);
        lanes[k] += v * v;
      }
    const V all = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    double part = 0;
    for (int64_t k = 0; k < W; k++) part += all[k];
    sum += part;
  }
  for (; i < n; i++) sum += double(x[i]) * x[i];
  return sum;
}

}  // namespace
