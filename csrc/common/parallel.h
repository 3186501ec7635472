// Threads: one OpenMP pool, shared with torch (both link libgomp.so.1), and static splits.
//
// What a thread computes must not depend on how the work was split: a split moves whole outputs.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace pagemill {

// The threads of every parallel region. Kept here and not in OpenMP, whose setting belongs to the
// thread that made it; the engine may run steps in another one.
int num_threads();
void set_num_threads(int count);

// Bind thread i of all later parallel regions, torch's too, to the processors places[i] (Linux's numbers);
// threads past the end, and all with {}, stay where the system puts them.
void pin_threads(std::vector<std::vector<int>> places);

// Inside a region: let the calling thread, its part `part`, go to its place.
void enter_part(int64_t part);

// Inside a body of parallel_for: which of the at most num_threads() parts it is.
inline int part_index() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Call body(first, last) with even parts of 0..count, one a thread; parts are multiples of `grain`,
// but for the last. One part runs in the caller without waking anyone. What a part throws (memory that the
// system refuses) is thrown on to the caller when all parts have ended: of several, that of the first part.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  const int64_t units = (count + grain - 1) / grain;
  int64_t threads = num_threads();
  if (threads > units) threads = units;
  if (threads <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return;
  }
#if defined(_OPENMP)
  // An exception that leaves a parallel region ends the process.
  std::exception_ptr thrown;
  int64_t thrown_by = threads;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    // OpenMP may give fewer than asked for.
    const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
    enter_part(part);
    const int64_t first = units * part / parts * grain;
    const int64_t last = units * (part + 1) / parts * grain;
    try {
      if (first < last) body(first, last < count ? last : count);
    } catch (...) {
#pragma omp critical(pagemill_parallel_for)
      if (part < thrown_by) {
        thrown = std::current_exception();
        thrown_by = part;
      }
    }
  }
  if (thrown) std::rethrow_exception(thrown);
#else
  body(int64_t{0}, count);
#endif
}

}  // namespace pagemill
