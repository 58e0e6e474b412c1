// Times of kernels, measured by events, for the disabled tests that print them.
#pragma once

#include <functional>

#include "cpp/sm90_problem.h"

namespace openmsa::testing {

// bf16 values of a short random period, which no cache of this size profits from, in GPU memory that the caller
// releases.
void* random_rows(int64_t elements);

// Of 20 launches after 3, without a flush.
double median_milliseconds(const std::function<void()>& call);

}  // namespace openmsa::testing
