#pragma once

namespace openmsa::cuda {

// PTX ISA, "Floating Point Instructions: rcp". 1 / x within 1 unit in the last place; 0 of infinity, infinity of 0.
__device__ inline float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace openmsa::cuda
