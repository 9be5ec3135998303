// NVFP4: E2M1 with E4M3 scales of blocks and a float32 scale of the tensor, as reference.py defines it; and the random
// Hadamard transform of hadamard.py.

namespace {

// b of each block: (amax / 6) / t, at most E4M3's largest, rounded to E4M3; and the divisors b * t, Inf where that is 0.
// Returns whether something saturates with any of them.
bool choose_nvfp4_scales(const uint32_t* amax, float* scales, float* divisors, int64_t n, float tensor_scale,
                         const Format& f, const Format& e4m3) {
  uint32_t ideal[GROUP];
  uint16_t rounded[GROUP];
  for (int64_t i = 0; i < n; i++) ideal[i] = bits(std::min(real(amax[i]) / f.max / tensor_scale, e4m3.max));
  cast<uint16_t>(ideal, rounded, n, 1.0f, Rounding(e4m3));
  uint32_t saturating = 0;
  for (int64_t i = 0; i < n; i++) {
    scales[i] = real(widen(rounded[i]));
    const float divisor = scales[i] * tensor_scale;
    divisors[i] = divisor == 0 ? real(INF) : divisor;
    saturating |= real(amax[i]) / divisors[i] > f.limit ? 1u : 0u;
  }
  return saturating;
}

// The finite elements of a block that saturate with this divisor.
template <typename T>
int64_t count_beyond(const T* x, const Band& band, int64_t block, float divisor, float limit) {
  int64_t beyond = 0;
  band.each_row(block, block + 1, [&](int64_t, int64_t at, int64_t n) {
    for (int64_t i = at; i < at + n; i++) {
      const uint32_t magnitude = widen(x[i]) & ABS;
      beyond += (magnitude < INF) & (real(magnitude) / divisor > limit);
    }
  });
  return beyond;
}

template <typename T>
uint32_t quantize_nvfp4_band(const T* x, uint16_t* q, float* scales, const Band& band, float tensor_scale,
                             const Format& f, const Format& e4m3, Dice dice, Counts& c) {
  const int64_t across = band.across(), fitting = BLOCK / (band.height * band.width);
  const int64_t together = std::min(GROUP, std::max<int64_t>(1, fitting));
  const Rounding rounding(f);
  uint32_t top = 0, amax[GROUP];
  float own[GROUP];
  for (int64_t first = 0; first < across; first += together) {
    const int64_t last = std::min(across, first + together);
    top = std::max(top, measure_blocks(x, band, first, last, amax, c));
    const bool saturating =
        choose_nvfp4_scales(amax, scales + first, own, last - first, tensor_scale, f, e4m3);
    const float* divisors = own - first;
    if (dice.draw) {
      cast_blocks_at_random<true>(x, q, band, first, last, divisors, rounding, dice);
    } else {
      band.each_row(first, last, [=](int64_t block, int64_t at, int64_t n) INLINED {
        cast<uint16_t, true, true>(x + at, q + at, n, divisors[block], rounding);
      });
    }
    for (int64_t block = first; saturating && block < last; block++) {
      if (real(amax[block - first]) / divisors[block] <= f.limit) continue;
      c.saturated += count_beyond(x, band, block, divisors[block], f.limit);
      c.blocks++;
    }
  }
  return top;
}

// The rows [0, rows) of a matrix, in blocks; `dice` as for the first of them.
template <typename T>
uint32_t quantize_nvfp4(const T* x, uint16_t* q, float* scales, int64_t rows, int64_t columns, int64_t height,
                        int64_t width, float tensor_scale, const Format& f, const Format& e4m3, Dice dice,
                        bool counting, Counts& c) {
  const int64_t across = (columns + width - 1) / width, group = rows_together(height, columns);
  uint32_t top = 0;
  for (int64_t first = 0; first < rows; first += group) {
    const int64_t last = std::min(rows, first + group);
    for (int64_t row = first; row < last; row += height) {
      const Band band{std::min(height, rows - row), columns, width};
      const uint32_t amax =
          quantize_nvfp4_band(x + row * columns, q + row * columns, scales + row / height * across, band,
                              tensor_scale, f, e4m3, Dice{dice.draw, dice.origin + row * columns}, c);
      top = std::max(top, amax);
    }
    for (int64_t i = first * columns; counting && i < last * columns; i += BLOCK)
      count(x + i, q + i, std::min(BLOCK, last * columns - i), f, c);
  }
  return top;
}

// The multipliers of statistics: 1 / (b * t), and 1 where that is 0.
void nvfp4_multipliers(const float* scales, float tensor_scale, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float divisor = scales[i] * tensor_scale;
    to[i] = divisor == 0 ? 1.0f : 1 / divisor;
  }
}

// One row, rotated in groups of 16 columns that are padded with zeros. A bit of `minus` is the sign of an element.
template <typename T> void rotate(const T* x, float* to, int64_t columns, uint32_t minus) {
  for (int64_t start = 0; start < columns; start += NV) {
    float v[NV] = {};
    const int64_t n = std::min(NV, columns - start);
    for (int64_t i = 0; i < n; i++) v[i] = real(widen(x[start + i]) ^ (minus >> i << 31));
    for (int64_t step = 1; step < NV; step *= 2)
      for (int64_t i = 0; i < NV; i++)
        if (!(i & step)) {
          const float low = v[i], high = v[i + step];
          v[i] = low + high, v[i + step] = low - high;
        }
    for (int64_t i = 0; i < NV; i++) to[start + i] = v[i] * 0.25f;
  }
}

}  // namespace
