// Emulates src/cuda/common/instructions/exp2.cuh.
#pragma once

#include <cfloat>
#include <cmath>

namespace openmsa::cuda {

inline float exp2_approximate(float x) {
  const float result = std::exp2(x);
  return result < FLT_MIN ? 0.0F : result;
}

}  // namespace openmsa::cuda
