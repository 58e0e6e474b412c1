// A loop over independent items on several threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>

#include "host/threads.h"

namespace openmsa::host {

// body(item, scratch) for every item in [0, count), handed out in ascending order one by one; each thread that gets an
// item default-constructs one Scratch and reuses it. Exceptions may not cross an OpenMP region: the first one ends the
// loop and is carried out of it.
template <typename Scratch, typename Body>
void parallel_for(int64_t count, const Body& body) {
  const int threads = count > 1 ? usable_threads() : 1;
  if (threads == 1) {
    if (count <= 0) return;
    Scratch scratch;
    for (int64_t item = 0; item < count; ++item) body(item, scratch);
    return;
  }
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  // All threads even for few items: GNU's runtime ends those that a smaller team leaves out and starts them anew later.
#pragma omp parallel num_threads(threads)
  {
    try {
      std::optional<Scratch> scratch;
      for (int64_t item = next++; item < count; item = next++) {
        if (!scratch) scratch.emplace();
        body(item, *scratch);
      }
    } catch (...) {
      next = count;
#pragma omp critical(openmsa_parallel_failure)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// body(item), for loops that need no scratch.
template <typename Body>
void parallel_for(int64_t count, const Body& body) {
  struct Nothing {};
  parallel_for<Nothing>(count, [&body](int64_t item, Nothing&) { body(item); });
}

}  // namespace openmsa::host
