// The samples of sampling.py in one pass: the quantisation error, and the exponents of the input.

#include <bit>

namespace {

constexpr int64_t LANES = VECTOR / sizeof(double);
constexpr int64_t SUMS = 8;  // equal on every processor, so that sums have the same bits
constexpr int EXPONENTS = 256, SMALL = 24, APART = 4;

// What one thread has seen.
struct Sample {
  double error = 0, signal = 0;
  // By float32's own exponent. Neighbours are alike and counted apart, because one count would wait for the other.
  int64_t seen[APART][EXPONENTS] = {};
  int64_t small[SMALL] = {};  // zeros, then the subnormals from 2^-149 on, which have exponent 0
};

template <typename T> void sample_exponents(const T* x, int64_t n, Sample& s) {
  const auto exponent = [](T v) { return widen(v) >> 23 & 0xff; };
  const auto small = [&] { return s.seen[0][0] + s.seen[1][0] + s.seen[2][0] + s.seen[3][0]; };
  const int64_t before = small();
  int64_t i = 0;
  for (; i + APART <= n; i += APART)
    for (int k = 0; k < APART; k++) s.seen[k][exponent(x[i + k])]++;
  for (; i < n; i++) s.seen[0][exponent(x[i])]++;
  if (small() == before) return;
  for (i = 0; i < n; i++)
    if (!exponent(x[i])) s.small[32 - std::countl_zero(widen(x[i]) & ABS)]++;
}

// Sums of (x - q * inverse)^2 and of x^2 over the elements where both are finite, in float64.
template <typename T> void sample_squares(const T* x, const uint16_t* q, int64_t n, double inverse, Sample& s) {
  typedef double D __attribute__((vector_size(LANES * sizeof(double))));
  typedef float F __attribute__((vector_size(LANES * sizeof(float))));
  typedef uint32_t U __attribute__((vector_size(LANES * sizeof(uint32_t))));
  typedef T V __attribute__((vector_size(LANES * sizeof(T))));
  typedef uint16_t H __attribute__((vector_size(LANES * sizeof(uint16_t))));
  constexpr int UP = sizeof(T) == 4 ? 0 : 16;
  D error[SUMS / LANES] = {}, signal[SUMS / LANES] = {};
  const D zero = {};
  const auto add = [&](const T* from, const uint16_t* quantized, int64_t to) {
    V v;
    H h;
    std::memcpy(&v, from, sizeof v);
    std::memcpy(&h, quantized, sizeof h);
    const D wide = __builtin_convertvector((F)(__builtin_convertvector(v, U) << UP), D);
    const D off = __builtin_convertvector((F)(__builtin_convertvector(h, U) << 16), D) * inverse - wide;
    const auto finite = off - off == zero;
    error[to] += finite ? off * off : zero;
    signal[to] += finite ? wide * wide : zero;
  };
  const auto add_all = [&](const T* from, const uint16_t* quantized) {
    for (int64_t k = 0; k < SUMS / LANES; k++) add(from + k * LANES, quantized + k * LANES, k);
  };
  int64_t i = 0;
  for (; i + SUMS <= n; i += SUMS) add_all(x + i, q + i);
  if (i < n) {
    // The remainder, padded with zeros, which change nothing.
    T left[SUMS] = {};
    uint16_t quantized[SUMS] = {};
    std::copy(x + i, x + n, left);
    std::copy(q + i, q + n, quantized);
    add_all(left, quantized);
  }
  for (int64_t k = 0; k < SUMS; k++) s.error += error[k / LANES][k % LANES], s.signal += signal[k / LANES][k % LANES];
}

void add_exponents(const Sample& s, double* to) {
  for (int k = 0; k < SMALL; k++) to[k] += s.small[k];
  for (int e = 1; e < EXPONENTS; e++)
    for (const auto& seen : s.seen) to[SMALL - 1 + e] += seen[e];
}

// Adds the exponents alone.
template <typename T> void exponents(const T* x, int64_t n, int threads, double* to) {
  Array<Sample> parts(threads);
  const int64_t pieces = (n + PIECE - 1) / PIECE;
  share(threads, [&](int part) {
    for (int64_t piece = pieces * part / threads; piece < pieces * (part + 1) / threads; piece++)
      sample_exponents(x + piece * PIECE, std::min(PIECE, n - piece * PIECE), parts[part]);
  });
  for (int part = 0; part < threads; part++) add_exponents(parts[part], to);
}

// Adds to `sample`, laid out as in statistics.py. `inverse` has one number for each row. The order of the sums, and
// with it their last bits, depends only on the number of threads.
template <typename T>
void sample(const T* x, const uint16_t* q, const float* inverse, int64_t rows, int64_t columns, int threads,
            double* sample) {
  const int64_t pieces = (columns + PIECE - 1) / PIECE;
  Array<Sample> parts(threads);
  share(threads, [&](int part) {
    for (int64_t piece = rows * pieces * part / threads; piece < rows * pieces * (part + 1) / threads; piece++) {
      const int64_t row = piece / pieces, first = piece % pieces * PIECE;
      const int64_t at = row * columns + first, n = std::min(PIECE, columns - first);
      sample_exponents(x + at, n, parts[part]);
      sample_squares(x + at, q + at, n, inverse[row], parts[part]);
    }
  });
  for (int part = 0; part < threads; part++) {
    const Sample& s = parts[part];
    sample[0] += s.error, sample[1] += s.signal;
    add_exponents(s, sample + 2);
  }
}

}  // namespace
