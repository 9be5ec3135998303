// One scale for a whole tensor. Work goes on in pieces that stay in the first-level cache, with room for what is
// fetched meanwhile: cast one, then count in what was written, of which more fits into a vector than of float32.

namespace {

constexpr int COUNTS = 1, AMAX = 2;
constexpr int64_t PIECE = 2048;

// quantization.py's multiplier: `top` / amax within float32's normal range, perhaps as a power of two.
float choose_scale(float amax, float top, bool power_of_two, float otherwise) {
  if (!(amax > 0 && amax < real(INF))) return otherwise;
  const float scale = std::min(std::max(top / amax, TINY), real(0x7f7fffff));
  return power_of_two ? real(bits(scale) & INF) : scale;
}

// `wanted`: COUNTS and AMAX, added up. `bound`: at least the finite elements' amax; Inf where that is not known.
template <typename T, typename Out>
uint32_t quantize(const T* x, Out* q, int64_t n, float scale, const Format& f, int wanted, float bound, Counts& c) {
  int64_t zeros = 0, flushed = 0, below = 0, saturated = 0, nonfinite = 0;
  uint32_t top = 0;
  const Rounding rounding(f);
  // Rare: a finite element times the scale may be Inf. What each piece's peak does not show is asked of every x.
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
      // Rare: something is not finite, or saturates. A second look while it is in the cache says how much.
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

}  // namespace
