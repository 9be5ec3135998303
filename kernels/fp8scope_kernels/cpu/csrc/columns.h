// One scale for each run of elements of a column: the blocks of a transposed matrix, in the order of the matrix in
// memory. Reading along rows takes whole cache lines, which a transpose does not.

namespace {

constexpr int64_t STRIP = 256;  // columns processed together, so that a run of rows of them stays in the cache

// The largest finite element of each column of n <= STRIP.
template <typename T> void measure_columns(const T* x, int64_t rows, int64_t stride, int64_t n, uint32_t* amax) {
  std::fill_n(amax, n, 0);
  for (int64_t row = 0; row < rows; row++) {
    const T* __restrict from = x + row * stride;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t b = widen(from[i]) & ABS, finite = b < INF ? b : 0;
      amax[i] = std::max(amax[i], finite);
    }
  }
}

// One row of n <= STRIP elements: q, or q / s with `Divide`, and q * (1 / s) with `Invert`.
template <bool Divide, bool Invert, typename T, typename Out>
void write_row(const T* x, Out* out, int64_t n, const float* scales, const float* inverse, const Rounding& rounding) {
  if constexpr (!Divide && !Invert) {
    cast<Out>(x, out, n, scales, rounding);
  } else {
    uint16_t q[STRIP];
    cast<uint16_t>(x, q, n, scales, rounding);
    Out* __restrict to = out;
    for (int64_t i = 0; i < n; i++)
      to[i] = narrow<Out>(Invert ? real(widen(q[i])) * inverse[i] : real(widen(q[i])) / scales[i]);
  }
}

// The runs of `height` rows in columns [first, last) of x [rows, columns]. `scales`: [runs, columns].
template <bool Divide, bool Invert, typename T, typename Out>
void quantize_columns(const T* x, Out* out, float* scales, int64_t rows, int64_t columns, int64_t height, int rule,
                      const Format& f, int64_t first, int64_t last) {
  const Rounding rounding(f);
  uint32_t amax[STRIP];
  float inverse[STRIP];
  for (int64_t column = first; column < last; column += STRIP) {
    const int64_t n = std::min(STRIP, last - column);
    for (int64_t row = 0; row < rows; row += height) {
      const int64_t end = std::min(rows, row + height);
      float* mine = scales + row / height * columns + column;
      measure_columns(x + row * columns + column, end - row, columns, n, amax);
      choose_scales(amax, mine, n, f, rule);
      for (int64_t i = 0; Invert && i < n; i++) inverse[i] = 1 / mine[i];
      for (int64_t at = row; at < end; at++)
        write_row<Divide, Invert>(x + at * columns + column, out + at * columns + column, n, mine, inverse, rounding);
    }
  }
}

}  // namespace
