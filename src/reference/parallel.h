// A loop over independent items on all OpenMP threads. Exceptions may not cross an OpenMP region: the first one is
// carried out of it.
#pragma once

#include <cstdint>
#include <exception>

namespace openmsa::reference {

// body(item, scratch) for every item in [0, count); each thread default-constructs one Scratch and reuses it.
template <typename Scratch, typename Body>
void parallel_for(int64_t count, const Body& body) {
  std::exception_ptr failure;
#pragma omp parallel
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < count; ++item) {
      try {
        body(item, scratch);
      } catch (...) {
#pragma omp critical(openmsa_reference_failure)
        if (!failure) failure = std::current_exception();
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace openmsa::reference
