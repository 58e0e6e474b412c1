// A loop over independent items on all OpenMP threads. Exceptions may not cross an OpenMP region: the first one is
// carried out of it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <exception>

namespace openmsa::host {

// Whether this process may use several threads. A child that was forked after a parallel loop may not: GNU's OpenMP
// would wait there for the parent's threads, which a fork does not copy.
inline bool may_use_threads() {
  static std::atomic<pid_t> s_first_user{0};
  const pid_t self = getpid();
  pid_t user = 0;
  return s_first_user.compare_exchange_strong(user, self) || user == self;
}

// body(item, scratch) for every item in [0, count); each thread default-constructs one Scratch and reuses it.
template <typename Scratch, typename Body>
void parallel_for(int64_t count, const Body& body) {
  std::exception_ptr failure;
#pragma omp parallel if (count > 1 && may_use_threads())
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < count; ++item) {
      try {
        body(item, scratch);
      } catch (...) {
#pragma omp critical(openmsa_parallel_failure)
        if (!failure) failure = std::current_exception();
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace openmsa::host
