#pragma once

namespace openmsa::cuda {

// PTX ISA, "Floating Point Instructions: ex2". 2^x within 2 units in the last place; subnormal results are 0.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// "lg2". log2 x within 2^-22 of 1 or of the result, whichever is larger; subnormal operands count as 0.
__device__ inline float log2_approximate(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// "rcp". 1 / x within a unit in the last place; subnormal operands count as 0, subnormal results are 0.
__device__ inline float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace openmsa::cuda
