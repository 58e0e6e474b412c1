// Emulates src/cuda/common/instructions/log2.cuh.
#pragma once

#include <cfloat>
#include <cmath>

namespace openmsa::cuda {

inline float log2_approximate(float x) { return std::log2(x < FLT_MIN ? 0.0F : x); }

}  // namespace openmsa::cuda
