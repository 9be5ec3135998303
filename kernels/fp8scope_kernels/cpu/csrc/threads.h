// Shares work between torch's own threads; another pool would compete with them for the processors.
//
// `team` is GOMP_parallel of the OpenMP runtime that torch has loaded, GNU's or LLVM's; library.py looks it
// up, so that this library does not depend on an OpenMP runtime. Without it, everything runs on the calling thread.

#include <cstdlib>

namespace {

using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);
Team team = nullptr;

// Calls work(part) once for each part, on at most `parts` threads. Threads take the next part until none is left.
template <typename Work> void share(int parts, const Work& work) {
  struct Job {
    const Work& work;
    int parts, next;
  } job{work, parts, 0};
  const auto run = [](void* data) {
    Job& j = *(Job*)data;
    for (int part; (part = __atomic_fetch_add(&j.next, 1, __ATOMIC_RELAXED)) < j.parts;) j.work(part);
  };
  if (team && parts > 1) team(run, &job, unsigned(parts), 0);
  else run(&job);
}

// Calls work(first, last) for each thread's share of n elements, which begins at a multiple of `step`.
template <typename Work> void share_range(int64_t n, int64_t step, int threads, const Work& work) {
  const int64_t steps = (n + step - 1) / step;
  const int parts = int(std::min<int64_t>(threads, steps));
  share(parts, [&](int part) {
    work(std::min(n, steps * part / parts * step), std::min(n, steps * (part + 1) / parts * step));
  });
}

// Held by one thread at a time, for a few additions only.
struct Turn {
  int& taken;

  explicit Turn(int& flag) : taken(flag) { while (__atomic_exchange_n(&taken, 1, __ATOMIC_ACQUIRE)) {} }
  Turn(const Turn&) = delete;
  ~Turn() { __atomic_store_n(&taken, 0, __ATOMIC_RELEASE); }
};

void add(const Counts& part, Counts& c) {
  c.zeros += part.zeros, c.flushed += part.flushed, c.below += part.below;
  c.saturated += part.saturated, c.nonfinite += part.nonfinite, c.blocks += part.blocks;
}

// The same for work(first, last, counts) that returns a maximum: adds up the counts, returns the largest.
template <typename Work>
uint32_t share_counting(int64_t n, int64_t step, int threads, Counts& c, const Work& work) {
  uint32_t top = 0;
  int taken = 0;
  share_range(n, step, threads, [&](int64_t first, int64_t last) {
    Counts part = {};
    const uint32_t peak = work(first, last, part);
    const Turn turn(taken);
    add(part, c);
    top = std::max(top, peak);
  });
  return top;
}

// Memory that is freed at the end of the scope. std::vector would need the C++ runtime, which the library does without.
template <typename T> struct Array {
  T* data;

  explicit Array(int64_t n) : data((T*)std::calloc(n, sizeof(T))) { if (!data) std::abort(); }
  Array(const Array&) = delete;
  ~Array() { std::free(data); }
  T& operator[](int64_t i) { return data[i]; }
};

}  // namespace
