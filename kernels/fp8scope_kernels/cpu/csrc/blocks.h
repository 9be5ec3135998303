// One scale for each block of a matrix. Blocks may be as short as 32 elements (MX), so each step (amaxes, scales, casts)
// processes many blocks before the next step.

namespace {

constexpr int64_t MX = 32, NV = 16;
constexpr int64_t GROUP = BLOCK / MX;  // the most blocks processed together

// One row of blocks: [height, columns].
struct Band {
  int64_t height, columns, width;

  int64_t across() const { return (columns + width - 1) / width; }

  // Calls f(block, offset, elements) for each row of each block from `first` on.
  INLINED inline void each_row(int64_t first, int64_t last, const auto& f) const {
    const int64_t whole = std::min(last, columns / width);
    for (int64_t row = 0; row < height; row++) {
      int64_t block = first;
      // A loop of unknown length takes twice the time for so few elements.
      if (width == MX)
        for (; block < whole; block++) f(block, row * columns + block * MX, MX);
      if (width == NV)
        for (; block < whole; block++) f(block, row * columns + block * NV, NV);
      for (; block < last; block++)
        f(block, row * columns + block * width, std::min(width, columns - block * width));
    }
  }
};

// The multipliers of reference.py. `rule`: 0 is M / amax, 1 rounds it to a power of two, 2 is the rule of OCP MX 1.0.
// Returns whether something saturates with any of them.
bool choose_scales(const uint32_t* amax, float* scales, int64_t n, const Format& f, int rule) {
  const float max = f.max, power = real(uint32_t(f.max_exponent + 127) << 23), e8m0 = real(0x7f000000);
  const float most = real(0x7f7fffff);
  const uint32_t kept = rule ? INF : ~0u;
  uint32_t saturating = 0;
  for (int64_t i = 0; i < n; i++) {
    const float size = real(amax[i]);
    const float exact = real(bits(std::min(std::max(max / size, TINY), most)) & kept);
    const float floor = std::min(power / real(bits(std::max(size, TINY)) & INF), e8m0);
    scales[i] = amax[i] ? rule == 2 ? floor : exact : 1.0f;
    saturating |= size * scales[i] > f.limit ? 1u : 0u;
  }
  return saturating;
}

// Smallest, median (the lower of the middle two) and largest of n scales, which are positive.
void summarize(const float* scales, int64_t n, int rule, Counts& c) {
  const int64_t middle = (n - 1) / 2;
  if (rule == 0) {
    Array<uint32_t> all(n);
    for (int64_t i = 0; i < n; i++) all[i] = bits(scales[i]);
    const auto ends = std::minmax_element(all.data, all.data + n);
    c.smallest = real(*ends.first), c.largest = real(*ends.second);
    std::nth_element(all.data, all.data + middle, all.data + n);
    c.median = real(all[middle]);
    return;
  }
  // Powers of two have only an exponent. Neighbours are often equal; separate counters avoid waiting for a store.
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

// The largest finite element of a block; counts elements that saturate or are not finite with this scale.
template <typename T>
uint32_t inspect_block(const T* x, const Band& band, int64_t block, float scale, float limit, Counts& rare) {
  uint32_t amax = 0;
  band.each_row(block, block + 1, [&](int64_t, int64_t at, int64_t n) {
    amax = std::max(amax, inspect(x + at, n, scale, limit, rare));
  });
  return amax;
}

// The blocks' amaxes, of finite elements; returns the largest.
template <typename T>
uint32_t measure_blocks(const T* x, const Band& band, int64_t first, int64_t last, uint32_t* amax, Counts& c) {
  uint32_t top = 0;
  std::fill_n(amax, last - first, 0);
  band.each_row(first, last, [=](int64_t block, int64_t at, int64_t n) INLINED {
    amax[block - first] = std::max(amax[block - first], widen(largest(x + at, n)));
  });
  for (int64_t i = 0; i < last - first; i++) {
    if (amax[i] >= INF) {
      Counts rare = {};
      amax[i] = inspect_block(x, band, first + i, 1, real(INF), rare);
      c.nonfinite += rare.nonfinite;
    }
    top = std::max(top, amax[i]);
  }
  return top;
}

// Blocks that are rounded at random: the words of the call, and the element of the matrix that x begins with. Blocks
// then have a height of 1.
struct Dice {
  const Draw* draw;
  int64_t origin;
};

// Casts the blocks [first, last) of one row. They may be wider than the words that are drawn at a time.
template <bool Divide, typename T, typename Out>
void cast_blocks_at_random(const T* x, Out* q, const Band& band, int64_t first, int64_t last, const float* scales,
                           const Rounding& rounding, const Dice& dice) {
  Words words;
  const int64_t start = first * band.width, end = std::min(last * band.width, band.columns);
  for (int64_t piece = start; piece < end; piece += BLOCK) {
    const int64_t until = std::min(end, piece + BLOCK);
    const uint32_t* drawn = words.draw(*dice.draw, dice.origin + piece, until - piece);
    for (int64_t at = piece; at < until;) {
      const int64_t block = at / band.width, n = std::min(until, (block + 1) * band.width) - at;
      const auto cast_some = [&](int64_t size) INLINED {
        cast_at_random<Out, Divide>(x + at, q + at, drawn + (at - piece), size, scales[block], rounding);
      };
      // As above: a known length needs no remainder loop.
      if (n == NV) cast_some(NV);
      else if (n == MX) cast_some(MX);
      else cast_some(n);
      at += n;
    }
  }
}

template <typename T, typename Out>
uint32_t quantize_band(const T* x, Out* q, float* scales, const Band& band, int rule, const Format& f, Dice dice,
                       Counts& c) {
  const int64_t across = band.across(), fitting = BLOCK / (band.height * band.width);
  const int64_t together = std::min(GROUP, std::max<int64_t>(1, fitting));
  const Rounding rounding(f);
  uint32_t top = 0, amax[GROUP];
  for (int64_t first = 0; first < across; first += together) {
    const int64_t last = std::min(across, first + together);
    top = std::max(top, measure_blocks(x, band, first, last, amax, c));
    const bool saturating = choose_scales(amax, scales + first, last - first, f, rule);
    if (dice.draw) {
      cast_blocks_at_random<false>(x, q, band, first, last, scales, rounding, dice);
    } else {
      band.each_row(first, last, [=](int64_t block, int64_t at, int64_t n) INLINED {
        cast<Out>(x + at, q + at, n, scales[block], rounding);
      });
    }
    for (int64_t block = first; saturating && block < last; block++) {
      if (real(amax[block - first]) * scales[block] <= f.limit) continue;
      Counts rare = {};
      inspect_block(x, band, block, scales[block], f.limit, rare);
      c.saturated += rare.saturated;
      c.blocks++;
    }
  }
  return top;
}

// The number of rows that are counted together.
int64_t rows_together(int64_t height, int64_t columns) {
  return height * std::max<int64_t>(1, BLOCK / (height * columns));
}

template <typename T, typename Out>
uint32_t quantize_blocks(const T* x, Out* q, float* scales, int64_t rows, int64_t columns, int64_t height,
                         int64_t width, int rule, const Format& f, Dice dice, bool counting, Counts& c) {
  const int64_t across = (columns + width - 1) / width;
  const int64_t group = rows_together(height, columns);
  int64_t zeros = 0, flushed = 0, below = 0, saturated = 0, nonfinite = 0, blocks = 0;
  uint32_t top = 0;
  for (int64_t first = 0; first < rows; first += group) {
    const int64_t last = std::min(rows, first + group);
    Counts p = {};
    uint32_t amax = 0;
    for (int64_t row = first; row < last; row += height)
      amax = std::max(amax, quantize_band(x + row * columns, q + row * columns, scales + row / height * across,
                                          Band{std::min(height, rows - row), columns, width}, rule, f,
                                          Dice{dice.draw, dice.origin + row * columns}, p));
    for (int64_t i = first * columns; counting && i < last * columns; i += BLOCK)
      count(x + i, q + i, std::min(BLOCK, last * columns - i), f, p);
    zeros += p.zeros, flushed += p.flushed, below += p.below;
    saturated += p.saturated, nonfinite += p.nonfinite, blocks += p.blocks;
    top = std::max(top, amax);
  }
  c = {zeros, flushed, below, saturated, nonfinite, blocks, 0, 0, 0};
  return top;
}

// q / s of n elements (q * s with `Multiply`), rounded to nearest even.
template <bool Multiply, typename Out>
INLINED inline void dequantize(const uint16_t* __restrict q, Out* __restrict out, int64_t n, float scale) {
  for (int64_t i = 0; i < n; i++)
    out[i] = narrow<Out>(Multiply ? real(widen(q[i])) * scale : real(widen(q[i])) / scale);
}

// Whether 1 / scale is exact, so that a product with it has the bits of the quotient.
bool is_power(float scale) { return !(bits(scale) & ~INF); }

// q / s of each element's block (q * s with `Multiply`) in rows [start, end). Scales are [block rows, block columns].
template <bool Multiply, typename Out>
void dequantize_blocks(const uint16_t* q, const float* scales, Out* out, int64_t start, int64_t end, int64_t columns,
                       int64_t height, int64_t width) {
  const int64_t across = (columns + width - 1) / width;
  for (int64_t row = start; row < end; row++) {
    const float* mine = scales + row / height * across;
    Band{1, columns, width}.each_row(0, across, [=](int64_t block, int64_t at, int64_t n) INLINED {
      const auto* from = q + row * columns + at;
      auto* to = out + row * columns + at;
      const float scale = mine[block];
      if (Multiply) dequantize<true>(from, to, n, scale);
      else if (is_power(scale)) dequantize<true>(from, to, n, 1 / scale);
      else dequantize<false>(from, to, n, scale);
    });
  }
}

}  // namespace
