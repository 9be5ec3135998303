// Quantisation and its statistics in one pass over memory, for CPUs: the entry points, called by backend.py.
//
// Computes the same bits as reference.py. This file includes the others, so that there is one translation unit. The
// build of the package compiles it once for each level of processor (levels.py), into a library that needs only the
// C library.

#include "elements.h"
#include "threads.h"
#include "processor_level.h"
#include "counts.h"
#include "tensors.h"
#include "random.h"
#include "blocks.h"
#include "columns.h"
#include "nvfp4.h"
#include "samples.h"

namespace {

// The product of two operands with a scale per row: bfloat16 times both inverse scales, rounded.
template <typename Out>
void scale_product(const uint16_t* product, const float* left, const float* right, Out* out, int64_t start,
                   int64_t end, int64_t columns) {
  for (int64_t row = start; row < end; row++) {
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

// The same for both rows of a matrix with a scale per block. Either may be null.
void accumulate_matrix(double* row, double* block_row, int64_t n, float amax, const float* scales, int64_t blocks,
                       int rule, Counts& c) {
  summarize(scales, blocks, rule, c);
  if (row) accumulate(row, n, amax, c.median, c);
  if (block_row) accumulate_blocks(block_row, blocks, c);
}

// Calls go(x, q) with pointers of the elements' types. `wide`: x is float32, else bfloat16. `bytes`: q is FP8, else
// bfloat16.
template <typename Go> auto with_types(const void* x, void* q, int wide, int bytes, const Format& f, const Go& go) {
  const auto to = [&](auto* in) {
    if (!bytes) return go(in, (uint16_t*)q);
    return f.nan == FNUZ_NAN ? go(in, (Fnuz*)q) : go(in, (uint8_t*)q);
  };
  return wide ? to((const uint32_t*)x) : to((const uint16_t*)x);
}

}  // namespace

// A row may be null.
#pragma GCC visibility push(default)
extern "C" {

// The highest level that this processor supports: an index into LEVELS of levels.py.
int fp8scope_level() { return level(); }

// The digest of the sources of this library.
const char* fp8scope_sources() { return FP8SCOPE_SOURCES; }

// The OpenMP runtime's GOMP_parallel, or null for one thread.
void fp8scope_use_team(Team function) { team = function; }

float fp8scope_scale(float amax, float top, int power_of_two, float otherwise) {
  return choose_scale(amax, top, power_of_two, otherwise);
}

// The delayed scale of scaling_state.py. It is recomputed, and written to `scale`, at every `interval`-th call.
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

// Adds a call to a history, which has its newest entry first. A tensor of zeros, or without elements, says nothing of
// the next.
void fp8scope_remember(float* history, int64_t n, int64_t* calls, float amax) {
  if (amax == 0) return;
  std::memmove(history + 1, history, (n - 1) * sizeof(float));
  history[0] = amax;
  ++*calls;
}

float fp8scope_measure(const void* x, int64_t n, int wide, int threads) {
  Counts none = {};
  const auto go = [&](auto* in) {
    const auto work = [&](int64_t first, int64_t last, Counts&) { return measure(in + first, last - first); };
    return real(share_counting(n, 16 * BLOCK, threads, none, work));
  };
  return wide ? go((const uint32_t*)x) : go((const uint16_t*)x);
}

// Adds a tensor that is not quantised to its row. Each of the n elements counts `repeat` times. Returns the number of
// non-finite elements.
int64_t fp8scope_observe(const void* x, int64_t n, int64_t repeat, int dtype, int threads, double* row) {
  const Observed seen = observe(x, n, dtype, threads);
  row[0] += n * repeat;
  row[1] = std::max(row[1], double(seen.amax));
  row[2] = 1;
  row[6] += seen.nonfinite * repeat;
  return seen.nonfinite * repeat;
}

// The sum of the squares of `count` float32 tensors.
double fp8scope_squares(const float* const* tensors, const int64_t* sizes, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += squares(tensors[i], sizes[i]);
  return sum;
}

float fp8scope_inspect(const void* x, int64_t n, int wide, float scale, float limit, Counts* c) {
  const auto go = [&](auto* in) { return real(inspect(in, n, scale, limit, *c)); };
  return wide ? go((const uint32_t*)x) : go((const uint16_t*)x);
}

// `wanted` has AMAX if `amax` (of the finite elements; Inf if unknown) and c->nonfinite are needed but not known.
// Without `draw`, rounds to nearest. Returns amax.
float fp8scope_quantize(const void* x, void* q, int64_t n, int wide, int bytes, float scale, const Format* f,
                        int wanted, int threads, float amax, double* row, Counts* c, const Draw* draw) {
  if (wanted && !(amax * scale <= f->limit)) wanted |= AMAX;  // The same pass counts what saturates.
  if (wanted & AMAX) c->nonfinite = 0;
  const auto go = [&](auto* in, auto* out) {
    return real(share_counting(n, PIECE, threads, *c, [&](int64_t first, int64_t last, Counts& part) {
      const auto* from = in + first;
      return draw ? quantize_at_random(from, out + first, first, last - first, scale, *f, *draw, wanted, part)
                  : quantize(from, out + first, last - first, scale, *f, wanted, amax, part);
    }));
  };
  const float top = with_types(x, q, wide, bytes, *f, go);
  if (wanted & AMAX) amax = top;
  if (row) accumulate(row, n, amax, scale, *c);
  return amax;
}

void fp8scope_quantize_blocks(const void* x, void* q, float* scales, int64_t rows, int64_t columns, int64_t height,
                              int64_t width, int wide, int bytes, int rule, const Format* f, int threads,
                              double* row, double* block_row, const Draw* draw) {
  Counts c = {};
  const bool counting = row || block_row;
  const int64_t across = (columns + width - 1) / width, blocks = (rows + height - 1) / height * across;
  const auto go = [&](auto* in, auto* out) {
    const int64_t step = rows_together(height, columns);
    return real(share_counting(rows, step, threads, c, [&](int64_t first, int64_t last, Counts& part) {
      return quantize_blocks(in + first * columns, out + first * columns, scales + first / height * across,
                             last - first, columns, height, width, rule, *f, Dice{draw, first * columns}, counting,
                             part);
    }));
  };
  const float amax = with_types(x, q, wide, bytes, *f, go);
  if (counting) accumulate_matrix(row, block_row, rows * columns, amax, scales, blocks, rule, c);
}

// The same, but writes q / s of each element to `out`, float32 (`wide_out`) or bfloat16, while q is in the cache.
void fp8scope_round_blocks(const void* x, void* out, float* scales, int64_t rows, int64_t columns, int64_t height,
                           int64_t width, int wide, int wide_out, int rule, const Format* f, int threads, double* row,
                           double* block_row) {
  Counts c = {};
  const bool counting = row || block_row;
  const int64_t across = (columns + width - 1) / width, blocks = (rows + height - 1) / height * across;
  const auto go = [&](auto* in, auto* to) {
    const int64_t step = rows_together(height, columns);
    return real(share_counting(rows, step, threads, c, [&](int64_t first, int64_t last, Counts& total) {
      Array<uint16_t> q(std::min(step, last - first) * columns);
      uint32_t top = 0;
      for (int64_t start = first; start < last; start += step) {
        const int64_t size = std::min(step, last - start);
        float* mine = scales + start / height * across;
        Counts part = {};
        top = std::max(top, quantize_blocks(in + start * columns, q.data, mine, size, columns, height, width, rule, *f,
                                            Dice{nullptr, 0}, counting, part));
        dequantize_blocks<false>(q.data, mine, to + start * columns, 0, size, columns, height, width);
        add(part, total);
      }
      return top;
    }));
  };
  const auto from = [&](auto* in) { return wide_out ? go(in, (uint32_t*)out) : go(in, (uint16_t*)out); };
  const float amax = wide ? from((const uint32_t*)x) : from((const uint16_t*)x);
  if (counting) accumulate_matrix(row, block_row, rows * columns, amax, scales, blocks, rule, c);
}

// A scale for each run of `height` elements of a column of x [rows, columns]. `scales`: [runs, columns]. `out` is
// bfloat16 with q; or q / s with `divide`, then float32 if `wide_out`.
void fp8scope_quantize_columns(const void* x, void* out, float* scales, int64_t rows, int64_t columns, int64_t height,
                               int wide, int wide_out, int divide, int rule, const Format* f, int threads) {
  const auto go = [&](auto* in, auto* to) {
    share_range(columns, STRIP, threads, [&](int64_t first, int64_t last) {
      // Scales by a rule are powers of two, whose inverses are exact.
      if (divide && rule)
        quantize_columns<false, true>(in, to, scales, rows, columns, height, rule, *f, first, last);
      else if (divide) quantize_columns<true, false>(in, to, scales, rows, columns, height, rule, *f, first, last);
      else quantize_columns<false, false>(in, (uint16_t*)out, scales, rows, columns, height, rule, *f, first, last);
    });
  };
  const auto from = [&](auto* in) { wide_out ? go(in, (uint32_t*)out) : go(in, (uint16_t*)out); };
  wide ? from((const uint32_t*)x) : from((const uint16_t*)x);
}

// q is bfloat16, `scales` the E4M3 scales of the blocks.
void fp8scope_quantize_nvfp4(const void* x, uint16_t* q, float* scales, int64_t rows, int64_t columns, int64_t height,
                             int64_t width, int wide, float tensor_scale, const Format* f, const Format* e4m3,
                             int threads, double* row, double* block_row, const Draw* draw) {
  Counts c = {};
  const bool counting = row || block_row;
  const int64_t across = (columns + width - 1) / width, blocks = (rows + height - 1) / height * across;
  const auto go = [&](auto* in) {
    const int64_t step = rows_together(height, columns);
    return real(share_counting(rows, step, threads, c, [&](int64_t first, int64_t last, Counts& part) {
      return quantize_nvfp4(in + first * columns, q + first * columns, scales + first / height * across, last - first,
                            columns, height, width, tensor_scale, *f, *e4m3, Dice{draw, first * columns}, counting,
                            part);
    }));
  };
  const float amax = wide ? go((const uint32_t*)x) : go((const uint16_t*)x);
  if (!counting) return;
  Array<float> multipliers(blocks);
  nvfp4_multipliers(scales, tensor_scale, multipliers.data, blocks);
  accumulate_matrix(row, block_row, rows * columns, amax, multipliers.data, blocks, 0, c);
}

// The result is float32 [rows, columns padded to a multiple of 16].
void fp8scope_rotate(const void* x, float* to, int64_t rows, int64_t columns, int wide, uint32_t minus, int threads) {
  const int64_t padded = (columns + NV - 1) / NV * NV;
  const auto go = [&](auto* in) {
    share_range(rows, 1, threads, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; row++) rotate(in + row * columns, to + row * padded, columns, minus);
    });
  };
  wide ? go((const uint32_t*)x) : go((const uint16_t*)x);
}

// Adds the exponents of n elements to `to`, the bins of statistics.py.
void fp8scope_exponents(const void* x, int64_t n, int wide, int threads, double* to) {
  wide ? exponents((const uint32_t*)x, n, threads, to) : exponents((const uint16_t*)x, n, threads, to);
}

// q is bfloat16.
void fp8scope_sample(const void* x, const uint16_t* q, const float* inverse, int64_t rows, int64_t columns, int wide,
                     int threads, double* to) {
  wide ? sample((const uint32_t*)x, q, inverse, rows, columns, threads, to)
       : sample((const uint16_t*)x, q, inverse, rows, columns, threads, to);
}

// q is bfloat16; the result is float32 (`wide`) or bfloat16.
void fp8scope_dequantize_blocks(const void* q, const float* scales, void* out, int64_t rows, int64_t columns,
                                int64_t height, int64_t width, int wide, int multiply, int threads) {
  const auto go = [&](auto* to) {
    share_range(rows, 1, threads, [&](int64_t first, int64_t last) {
      const auto* from = (const uint16_t*)q;
      multiply ? dequantize_blocks<true>(from, scales, to, first, last, columns, height, width)
               : dequantize_blocks<false>(from, scales, to, first, last, columns, height, width);
    });
  };
  wide ? go((uint32_t*)out) : go((uint16_t*)out);
}

void fp8scope_scale_product(const void* product, const float* left, const float* right, void* out, int64_t rows,
                            int64_t columns, int wide, int threads) {
  const auto go = [&](auto* to) {
    share_range(rows, 1, threads, [&](int64_t first, int64_t last) {
      scale_product((const uint16_t*)product, left, right, to, first, last, columns);
    });
  };
  wide ? go((uint32_t*)out) : go((uint16_t*)out);
}
}  // extern "C"
#pragma GCC visibility pop
