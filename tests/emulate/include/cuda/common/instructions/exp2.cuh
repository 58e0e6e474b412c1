// Emulates src/cuda/common/instructions/exp2.cuh.
#pragma once

#include <cfloat>
#include <cmath>

namespace openmsa::cuda {

inline float exp2_approximate(float x) {
  const float result = std::exp2(x);
  return result < FLT_MIN ? 0.0F : result;
}

inline float log2_approximate(float x) { return std::log2(std::fabs(x) < FLT_MIN ? 0.0F : x); }

inline float reciprocal_approximate(float x) {
  const float result = 1.0F / (std::fabs(x) < FLT_MIN ? std::copysign(0.0F, x) : x);
  return std::fabs(result) < FLT_MIN ? std::copysign(0.0F, result) : result;
}

}  // namespace openmsa::cuda
