// The level of this processor: which of the libraries it can run.

#ifndef FP8SCOPE_SOURCES
#define FP8SCOPE_SOURCES ""  // what a compiler is given by hand
#endif

namespace {

// An index into the levels of native_levels.py. Compilers differ in the names of whole levels, not of features;
// __builtin_cpu_supports also asks whether the operating system saves the vectors' registers.
int level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const auto all = [](auto... has) { return (... && (has != 0)); };
  if (!all(__builtin_cpu_supports("ssse3"), __builtin_cpu_supports("sse4.2"), __builtin_cpu_supports("popcnt")))
    return 0;
  if (!all(__builtin_cpu_supports("avx2"), __builtin_cpu_supports("bmi"), __builtin_cpu_supports("bmi2"),
           __builtin_cpu_supports("fma")))
    return 1;
  if (!all(__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"), __builtin_cpu_supports("avx512cd"),
           __builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl")))
    return 2;
  return 3;
#else
  return 0;
#endif
}

}  // namespace
