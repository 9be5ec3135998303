// The level of this processor: the libraries that it can run.

#ifndef FP8SCOPE_SOURCES
#define FP8SCOPE_SOURCES ""  // what a compiler is given by hand
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

#if defined(__x86_64__)
// The registers that the operating system saves when it changes threads: the bits of XCR0.
uint32_t saved_registers() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}
#endif

// An index into the levels of levels.py, from the processor itself: __builtin_cpu_supports says no to
// everything where Zig links it. A level is what its library is compiled for.
int level() {
#if defined(__x86_64__)
  const auto has = [](uint32_t word, auto... bits) { return (... && (word >> bits & 1)); };
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  if (!has(c, 9, 19, 20, 23)) return 0;  // SSSE3, SSE4.1, SSE4.2, POPCNT
  const bool avx = has(c, 12, 27, 28);   // FMA, OSXSAVE, AVX
  if (!avx || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 1;
  const uint32_t saved = saved_registers();
  if (!has(saved, 1, 2) || !has(b, 3, 5, 8)) return 1;  // XMM, YMM; BMI, AVX2, BMI2
  if (!has(saved, 5, 6, 7) || !has(b, 16, 17, 28, 30, 31)) return 2;  // ZMM; AVX-512 F, DQ, CD, BW, VL
  return 3;
#else
  return 0;
#endif
}

}  // namespace
