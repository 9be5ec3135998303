// Counters. Most are taken from what the cast has written, the others from its input.

namespace {

// The width of the machine's vectors: wider ones are compared element by element.
#if defined(__AVX512BW__)
constexpr int64_t VECTOR = 64;
#elif defined(__AVX2__)
constexpr int64_t VECTOR = 32;
#else
constexpr int64_t VECTOR = 16;
#endif

template <typename T> struct Lanes { typedef T type __attribute__((vector_size(VECTOR))); };

// The number of ones over all lanes.
template <typename T> int64_t total(const typename Lanes<T>::type& v) {
  T lanes[sizeof v / sizeof(T)];
  std::memcpy(lanes, &v, sizeof v);
  uint32_t sum = 0;
  for (T lane : lanes) sum += lane;
  return sum;
}

// Counts the patterns, without sign, that are zero and that are below `limit`.
template <typename T> void count_small(const T* x, int64_t n, T limit, int64_t& zeros, int64_t& below) {
  using V = typename Lanes<T>::type;
  constexpr int64_t W = sizeof(V) / sizeof(T), MOST = SIGNLESS<T>;
  int64_t i = 0;
  while (i + W <= n) {
    V a = {}, b = {};
    for (const int64_t end = std::min(n - W, i + (MOST - 1) * W); i <= end; i += W) {
      V v;
      std::memcpy(&v, x + i, sizeof v);
      v &= SIGNLESS<T>;
      a -= (V)(v == 0);
      b -= (V)(v < limit);
    }
    zeros += total<T>(a);
    below += total<T>(b);
  }
  for (; i < n; i++) { zeros += (x[i] & SIGNLESS<T>) == 0; below += (x[i] & SIGNLESS<T>) < limit; }
}

template <typename T> int64_t count_zeros(const T* x, int64_t n) {
  uint32_t zeros = 0;
  for (int64_t i = 0; i < n; i++) zeros += (x[i] & SIGNLESS<T>) == 0;
  return zeros;
}

// The zeros, flushed and small elements of n <= BLOCK that were cast.
template <typename Out, typename T> void count(const T* x, const Out* q, int64_t n, const Format& f, Counts& c) {
  if constexpr (std::is_same_v<Out, Fnuz>) {
    // Without its sign the NaN is a zero.
    const uint8_t* bytes = (const uint8_t*)q;
    uint32_t nans = 0;
    for (int64_t i = 0; i < n; i++) nans += bytes[i] == FNUZ_NAN;
    count(x, bytes, n, f, c);
    c.flushed -= nans, c.below -= nans;
  } else {
    const Out normal = sizeof(Out) == 1 ? Out(1u << f.mantissa_bits) : Out(bits(f.smallest_normal) >> 16);
    int64_t flushed = 0;
    count_small<Out>(q, n, normal, flushed, c.below);
    c.flushed += flushed;
    // If no result is zero, no input is.
    if (flushed) c.zeros += count_zeros(x, n);
  }
}

// The largest pattern without its sign; Inf and NaN are larger than every number.
template <typename T> INLINED inline T largest(const T* x, int64_t n) {
  T top = 0;
  for (int64_t i = 0; i < n; i++) {
    const T magnitude = x[i] & SIGNLESS<T>;
    top = magnitude > top ? magnitude : top;
  }
  return top;
}

// Rare cases: counts elements that saturate or are not finite. Returns the largest finite element.
template <typename T> uint32_t inspect(const T* x, int64_t n, float scale, float limit, Counts& c) {
  const uint32_t most = bits(limit);
  uint32_t top = 0;
  for (int64_t start = 0; start < n; start += BLOCK) {
    // Counters have 32 bits, as wide as the patterns compared, so that the loop vectorises.
    uint32_t saturated = 0, nonfinite = 0;
    const int64_t end = std::min(n, start + BLOCK);
    for (int64_t i = start; i < end; i++) {
      const uint32_t b = widen(x[i]) & ABS, finite = b & -uint32_t(b < INF);
      const uint32_t scaled = bits(real(finite) * scale);
      nonfinite += b >= INF;
      saturated += (scaled > most) & (scaled <= INF);
      top = std::max(top, finite);
    }
    c.saturated += saturated;
    c.nonfinite += nonfinite;
  }
  return top;
}

}  // namespace
