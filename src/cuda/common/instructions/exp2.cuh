#pragma once

namespace openmsa::cuda {

// PTX ISA, "Floating Point Instructions: ex2". 2^x within 2 units in the last place; subnormal results are 0.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace openmsa::cuda
