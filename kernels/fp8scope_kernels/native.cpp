// Quantisation with its statistics in one pass over memory, for CPUs. Built at run time by native.py.
//
// The same bits as the definition in quantization.py and blocks.py. Work goes on in blocks that stay in the
// first-level cache: cast one, then count in what was written, of which more fits into a vector than of float32.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t BLOCK = 4096;
constexpr int COUNTS = 1, AMAX = 2;
constexpr uint32_t ABS = 0x7fffffff;
constexpr uint32_t INF = 0x7f800000;

constexpr float TINY = 0x1p-126f;  // float32's smallest normal

uint32_t bits(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
float real(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

// The float32 pattern of an element; bfloat16 is its upper half.
uint32_t widen(uint16_t x) { return uint32_t(x) << 16; }
uint32_t widen(uint32_t x) { return x; }

}  // namespace

// native.py has the same two structures.
struct Format {
  float max, smallest_normal, smallest_subnormal;
  int32_t mantissa_bits, bias, nan, max_exponent;
};
struct Counts {
  int64_t zeros, flushed, below, saturated, nonfinite, blocks;
  float smallest, median, largest;  // of the blocks' scales
};

namespace {

// `a` clamped and rounded to nearest even: the FP8 byte (uint8_t), or the same number as bfloat16 (uint16_t).
template <typename Out>
void cast(const auto* __restrict x, Out* __restrict q, int64_t n, float scale, const Format& f) {
  const int drop = 23 - f.mantissa_bits;
  const uint32_t max = bits(f.max), normal = bits(f.smallest_normal), half = (1u << (drop - 1)) - 1;
  const uint32_t rebias = uint32_t(127 - f.bias) << f.mantissa_bits, kept = ~0u << drop;
  // The last bit of this number is worth the smallest subnormal: adding it rounds.
  const float shift = 8388608.0f * f.smallest_subnormal;
  const uint32_t nan = f.nan, base = bits(shift);
  for (int64_t i = 0; i < n; i++) {
    const uint32_t b = bits(real(widen(x[i])) * scale), magnitude = b & ABS;
    const uint32_t clamped = std::min(magnitude, max);
    const float shifted = real(clamped) + shift;
    const uint32_t rounded = clamped + half + ((clamped >> drop) & 1);
    if constexpr (sizeof(Out) == 1) {
      const uint32_t code = clamped < normal ? bits(shifted) - base : (rounded >> drop) - rebias;
      q[i] = Out((magnitude > INF ? nan : code) | (b >> 24 & 0x80));
    } else {
      const uint32_t value = clamped < normal ? bits(shifted - shift) : rounded & kept;
      // The definition's sums leave +0 of whatever vanishes.
      q[i] = Out(((magnitude > INF ? 0x7fc00000 : value) | (value ? b & ~ABS : 0)) >> 16);
    }
  }
}

template <typename T> struct Lanes { typedef T type __attribute__((vector_size(64))); };
template <typename T> constexpr T SIGNLESS = T(~T(0)) >> 1;

// The number of ones over all lanes.
template <typename T> int64_t total(const typename Lanes<T>::type& v) {
  T lanes[sizeof v / sizeof(T)];
  std::memcpy(lanes, &v, sizeof v);
  uint32_t sum = 0;
  for (T lane : lanes) sum += lane;
  return sum;
}

// How many of n <= BLOCK patterns are zero, and below `limit`, without their sign.
template <typename T> void count_small(const T* x, int64_t n, T limit, int64_t& zeros, int64_t& below) {
  using V = typename Lanes<T>::type;
  constexpr int64_t W = sizeof(V) / sizeof(T);
  static_assert(BLOCK / W < SIGNLESS<T>, "a lane must hold its count");
  V a = {}, b = {};
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    V v;
    std::memcpy(&v, x + i, sizeof v);
    v &= SIGNLESS<T>;
    a -= (V)(v == 0);
    b -= (V)(v < limit);
  }
  zeros += total<T>(a);
  below += total<T>(b);
  for (; i < n; i++) { zeros += (x[i] & SIGNLESS<T>) == 0; below += (x[i] & SIGNLESS<T>) < limit; }
}

template <typename T> int64_t count_zeros(const T* x, int64_t n) {
  uint32_t zeros = 0;
  for (int64_t i = 0; i < n; i++) zeros += (x[i] & SIGNLESS<T>) == 0;
  return zeros;
}

// The largest pattern without its sign; Inf and NaN are larger than every number.
template <typename T> T largest(const T* x, int64_t n) {
  using V = typename Lanes<T>::type;
  constexpr int64_t W = sizeof(V) / sizeof(T);
  V best = {};
  T top = 0;
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    V v;
    std::memcpy(&v, x + i, sizeof v);
    v &= SIGNLESS<T>;
    best = v > best ? v : best;
  }
  T lanes[W];
  std::memcpy(lanes, &best, sizeof lanes);
  for (T lane : lanes) top = std::max(top, lane);
  for (; i < n; i++) top = std::max<T>(top, x[i] & SIGNLESS<T>);
  return top;
}

// What is rare: elements that saturate or are not finite, and the largest finite one.
template <typename T> uint32_t inspect(const T* x, int64_t n, float scale, float max, Counts& c) {
  uint32_t top = 0;
  for (int64_t start = 0; start < n; start += BLOCK) {
    // Counted in 32 bits, as wide as what is compared, so that vectors do it.
    uint32_t saturated = 0, nonfinite = 0;
    const int64_t end = std::min(n, start + BLOCK);
    for (int64_t i = start; i < end; i++) {
      const uint32_t b = widen(x[i]) & ABS, finite = b < INF;
      nonfinite += !finite;
      saturated += finite & uint32_t(real(b) * scale > max);
      top = std::max(top, finite ? b : 0);
    }
    c.saturated += saturated;
    c.nonfinite += nonfinite;
  }
  return top;
}

template <typename Out, typename T> void count(const T* x, const Out* q, int64_t n, const Format& f, Counts& c) {
  const Out normal = sizeof(Out) == 1 ? Out(1u << f.mantissa_bits) : Out(bits(f.smallest_normal) >> 16);
  int64_t flushed = 0;
  count_small<Out>(q, n, normal, flushed, c.below);
  c.flushed += flushed;
  // Where nothing became zero, nothing was.
  if (flushed) c.zeros += count_zeros(x, n);
}

// `wanted`: COUNTS and AMAX, added up.
template <typename T, typename Out>
uint32_t quantize(const T* x, Out* q, int64_t n, float scale, const Format& f, int wanted,
                  [[maybe_unused]] int threads, Counts& c) {
  int64_t zeros = 0, flushed = 0, below = 0;
  uint32_t top = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : zeros, flushed, below) reduction(max : top)
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t size = std::min(BLOCK, n - start);
    cast<Out>(x + start, q + start, size, scale, f);
    if (wanted & AMAX) top = std::max(top, widen(largest(x + start, size)));
    if (!(wanted & COUNTS)) continue;
    Counts part = {};
    count(x + start, q + start, size, f, part);
    zeros += part.zeros, flushed += part.flushed, below += part.below;
  }
  c.zeros = zeros, c.flushed = flushed, c.below = below;
  return top;
}

// quantization.py's multiplier: `top` / amax within float32's normal range, perhaps as a power of two.
float choose_scale(float amax, float top, bool power_of_two, float otherwise) {
  if (!(amax > 0 && amax < real(INF))) return otherwise;
  const float scale = std::min(std::max(top / amax, TINY), real(0x7f7fffff));
  return power_of_two ? real(bits(scale) & INF) : scale;
}

// blocks.py's multipliers. `rule`: 0 M / amax, 1 that as a power of two, 2 the rule of OCP MX 1.0.
float block_scale(uint32_t amax, const Format& f, int rule) {
  if (rule != 2 || amax == 0) return choose_scale(real(amax), f.max, rule == 1, 1.0f);
  const float power = real(bits(std::max(real(amax), TINY)) & INF), e8m0 = real(0x7f000000);
  return std::min(real(uint32_t(f.max_exponent + 127) << 23) / power, e8m0);
}

// Smallest, median (the lower of the middle two) and largest of n scales, which are positive.
void summarize(const float* scales, int64_t n, int rule, Counts& c) {
  std::vector<uint32_t> all;
  const int64_t middle = (n - 1) / 2;
  if (rule == 0) {
    for (int64_t i = 0; i < n; i++) all.push_back(bits(scales[i]));
    const auto ends = std::minmax_element(all.begin(), all.end());
    c.smallest = real(*ends.first), c.largest = real(*ends.second);
    std::nth_element(all.begin(), all.begin() + middle, all.end());
    c.median = real(all[middle]);
    return;
  }
  // Powers of two: their exponents say everything. Neighbours are alike and counted apart, because one count
  // would have to wait for the other.
  constexpr int64_t APART = 8;
  uint32_t seen[APART][256] = {};
  int64_t before = 0, count = 0;
  for (int64_t i = 0; i < n; i++) seen[i % APART][bits(scales[i]) >> 23]++;
  for (uint32_t e = 0; e < 256; e++, before += count) {
    count = 0;
    for (const auto& part : seen) count += part[e];
    if (!count) continue;
    const float scale = real(e << 23);
    if (before == 0) c.smallest = scale;
    if (before <= middle) c.median = scale;
    c.largest = scale;
  }
}

// One row of blocks: [height, columns] of x.
template <typename T, typename Out>
uint32_t quantize_band(const T* x, Out* q, float* scales, int64_t height, int64_t columns, int64_t width,
                       int rule, const Format& f, Counts& c) {
  uint32_t top = 0;
  for (int64_t left = 0; left < columns; left += width) {
    const int64_t n = std::min(width, columns - left);
    uint32_t amax = 0;
    for (int64_t r = 0; r < height; r++) amax = std::max(amax, widen(largest(x + r * columns + left, n)));
    Counts rare = {};
    if (amax >= INF) {
      amax = 0;
      for (int64_t r = 0; r < height; r++) amax = std::max(amax, inspect(x + r * columns + left, n, 1, f.max, rare));
      c.nonfinite += rare.nonfinite;
    }
    const float scale = *scales++ = block_scale(amax, f, rule);
    const bool inside = real(amax) * scale <= f.max;
    rare = {};
    for (int64_t r = 0; r < height; r++) {
      cast<Out>(x + r * columns + left, q + r * columns + left, n, scale, f);
      if (!inside) inspect(x + r * columns + left, n, scale, f.max, rare);
    }
    c.saturated += rare.saturated;
    c.blocks += rare.saturated > 0;
    top = std::max(top, amax);
  }
  return top;
}

template <typename T, typename Out>
uint32_t quantize_blocks(const T* x, Out* q, float* scales, int64_t rows, int64_t columns, int64_t height,
                         int64_t width, int rule, const Format& f, bool counting, [[maybe_unused]] int threads,
                         Counts& c) {
  const int64_t across = (columns + width - 1) / width;
  // Rows of blocks that are worth counting in at once.
  const int64_t group = height * std::max<int64_t>(1, BLOCK / (height * columns));
  int64_t zeros = 0, flushed = 0, below = 0, saturated = 0, nonfinite = 0, blocks = 0;
  uint32_t top = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) \
    reduction(+ : zeros, flushed, below, saturated, nonfinite, blocks) reduction(max : top)
  for (int64_t first = 0; first < rows; first += group) {
    const int64_t last = std::min(rows, first + group);
    Counts p = {};
    uint32_t amax = 0;
    for (int64_t row = first; row < last; row += height)
      amax = std::max(amax, quantize_band(x + row * columns, q + row * columns, scales + row / height * across,
                                          std::min(height, rows - row), columns, width, rule, f, p));
    for (int64_t i = first * columns; counting && i < last * columns; i += BLOCK)
      count(x + i, q + i, std::min(BLOCK, last * columns - i), f, p);
    zeros += p.zeros, flushed += p.flushed, below += p.below;
    saturated += p.saturated, nonfinite += p.nonfinite, blocks += p.blocks;
    top = std::max(top, amax);
  }
  c = {zeros, flushed, below, saturated, nonfinite, blocks, 0, 0, 0};
  if (counting) summarize(scales, across * ((rows + height - 1) / height), rule, c);
  return top;
}

// The float32 pattern of a number (uint32_t), or its bfloat16, rounded to nearest even (uint16_t).
template <typename Out> Out narrow(float x) {
  const uint32_t b = bits(x);
  if constexpr (sizeof(Out) == 4) return b;
  else return Out((b & ABS) > INF ? 0x7fc0 : (b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// q / s of each element's block, rounded to nearest even. Scales are [block rows, block columns].
template <typename Out>
void dequantize_blocks(const uint16_t* q, const float* scales, Out* out, int64_t rows, int64_t columns,
                       int64_t height, int64_t width, [[maybe_unused]] int threads) {
  const int64_t across = (columns + width - 1) / width;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t block = 0; block < across; block++) {
      const float scale = scales[row / height * across + block];
      const int64_t first = row * columns + block * width, n = std::min(width, columns - block * width);
      const uint16_t* __restrict from = q + first;
      Out* __restrict to = out + first;
      for (int64_t i = 0; i < n; i++) to[i] = narrow<Out>(real(widen(from[i])) / scale);
    }
  }
}

// The product of two operands with a scale per row: bfloat16 times both inverse scales, rounded.
template <typename Out>
void scale_product(const uint16_t* product, const float* left, const float* right, Out* out, int64_t rows,
                   int64_t columns, [[maybe_unused]] int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; row++) {
    const uint16_t* __restrict from = product + row * columns;
    Out* __restrict to = out + row * columns;
    const float scale = left[row];
    for (int64_t i = 0; i < columns; i++) to[i] = narrow<Out>(real(widen(from[i])) * scale * right[i]);
  }
}

// Adds one call to a row of statistics.py.
void accumulate(double* row, int64_t n, float amax, float scale, const Counts& c) {
  row[0] += n;
  row[1] = std::max(row[1], double(amax));
  row[2] = scale;
  row[3] += c.saturated;
  row[4] += c.flushed - c.zeros;
  row[5] += c.below - c.flushed;
  row[6] += c.nonfinite;
}

// The same for a row of block statistics, of n blocks.
void accumulate_blocks(double* row, int64_t n, const Counts& c) {
  row[0] += n;
  row[1] += c.blocks;
  row[2] = c.smallest, row[3] = c.median, row[4] = c.largest;
}

template <typename T> uint32_t measure(const T* x, int64_t n, [[maybe_unused]] int threads) {
  uint32_t top = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(max : top)
  for (int64_t start = 0; start < n; start += 16 * BLOCK)
    top = std::max(top, widen(largest(x + start, std::min(16 * BLOCK, n - start))));
  return top;
}

}  // namespace

// `wide`: x is float32, else bfloat16. `bytes`: q is FP8, else bfloat16. A row may be null.
extern "C" {

float fp8scope_scale(float amax, float top, int power_of_two, float otherwise) {
  return choose_scale(amax, top, power_of_two, otherwise);
}

// state.py's scale from the past, which replaces the one there is when its time has come.
float fp8scope_past_scale(const float* history, int64_t n, float* scale, const int64_t* calls, int64_t interval,
                          float top) {
  if (*calls % interval) return *scale;
  float amax = 0;
  bool nan = false;
  for (int64_t i = 0; i < n; i++) {
    amax = std::max(amax, history[i]);
    nan |= history[i] != history[i];
  }
  return *scale = choose_scale(nan ? real(INF) : amax, top, false, *scale);
}

// One more call in a history, which has its newest entry first.
void fp8scope_remember(float* history, int64_t n, int64_t* calls, float amax) {
  std::memmove(history + 1, history, (n - 1) * sizeof(float));
  history[0] = amax;
  ++*calls;
}

float fp8scope_measure(const void* x, int64_t n, int wide, int threads) {
  return real(wide ? measure((const uint32_t*)x, n, threads) : measure((const uint16_t*)x, n, threads));
}

float fp8scope_inspect(const void* x, int64_t n, int wide, float scale, float max, Counts* c) {
  return real(wide ? inspect((const uint32_t*)x, n, scale, max, *c) : inspect((const uint16_t*)x, n, scale, max, *c));
}

// `wanted` has AMAX where `amax` (of the finite elements) and c->nonfinite are not known; returns the former.
float fp8scope_quantize(const void* x, void* q, int64_t n, int wide, int bytes, float scale, const Format* f,
                        int wanted, int threads, float amax, double* row, Counts* c) {
  const auto go = [&](auto* in, auto* out) { return real(quantize(in, out, n, scale, *f, wanted, threads, *c)); };
  float top;
  if (wide) top = bytes ? go((const uint32_t*)x, (uint8_t*)q) : go((const uint32_t*)x, (uint16_t*)q);
  else top = bytes ? go((const uint16_t*)x, (uint8_t*)q) : go((const uint16_t*)x, (uint16_t*)q);
  if (wanted & AMAX) amax = top;
  // Rare: something saturates, or is not finite. A second look says how much.
  if (wanted && !(amax * scale <= f->max)) {
    c->nonfinite = 0;
    amax = fp8scope_inspect(x, n, wide, scale, f->max, c);
  }
  if (row) accumulate(row, n, amax, scale, *c);
  return amax;
}

void fp8scope_quantize_blocks(const void* x, void* q, float* scales, int64_t rows, int64_t columns, int64_t height,
                              int64_t width, int wide, int bytes, int rule, const Format* f, int threads,
                              double* row, double* block_row) {
  Counts c;
  const auto go = [&](auto* in, auto* out) {
    return real(quantize_blocks(in, out, scales, rows, columns, height, width, rule, *f, row || block_row, threads, c));
  };
  float amax;
  if (wide) amax = bytes ? go((const uint32_t*)x, (uint8_t*)q) : go((const uint32_t*)x, (uint16_t*)q);
  else amax = bytes ? go((const uint16_t*)x, (uint8_t*)q) : go((const uint16_t*)x, (uint16_t*)q);
  if (row) accumulate(row, rows * columns, amax, c.median, c);
  const int64_t blocks = ((rows + height - 1) / height) * ((columns + width - 1) / width);
  if (block_row) accumulate_blocks(block_row, blocks, c);
}

// q is bfloat16; the result is float32 (`wide`) or bfloat16.
void fp8scope_dequantize_blocks(const void* q, const float* scales, void* out, int64_t rows, int64_t columns,
                                int64_t height, int64_t width, int wide, int threads) {
  const auto go = [&](auto* to) {
    dequantize_blocks((const uint16_t*)q, scales, to, rows, columns, height, width, threads);
  };
  wide ? go((uint32_t*)out) : go((uint16_t*)out);
}

void fp8scope_scale_product(const void* product, const float* left, const float* right, void* out, int64_t rows,
                            int64_t columns, int wide, int threads) {
  const auto go = [&](auto* to) {
    scale_product((const uint16_t*)product, left, right, to, rows, columns, threads);
  };
  wide ? go((uint32_t*)out) : go((uint16_t*)out);
}
}
