// Emulates src/cuda/common/instructions/reciprocal.cuh.
#pragma once

namespace openmsa::cuda {

inline float reciprocal_approximate(float x) { return 1.0F / x; }

}  // namespace openmsa::cuda
