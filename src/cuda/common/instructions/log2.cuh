#pragma once

namespace openmsa::cuda {

// PTX ISA, "Floating Point Instructions: lg2". Within 2^-22, absolute between 0.5 and 2, else relative; -infinity of 0
// and of subnormal numbers.
__device__ inline float log2_approximate(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace openmsa::cuda
