#pragma once

#include <cstdint>

namespace openmsa::cuda {

// PTX ISA, "Data Movement and Conversion Instructions: cvt". Two e4m3 values to two f16 values, both lower first;
// exact.
__device__ inline uint32_t convert_e4m3x2_to_f16x2(uint16_t pair) {
  uint32_t result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
  return result;
}

// PTX ISA, "Data Movement and Conversion Instructions: cvt". Two f32 to a pair of 16-bit values, round to nearest even.
__device__ inline uint32_t convert_f32_to_bf16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
__device__ inline uint32_t convert_f32_to_f16x2(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// PTX ISA, "Data Movement and Conversion Instructions: cvt". Two f32 to a pair of e4m3, the lower first: round to
// nearest even, and beyond the largest number to that.
__device__ inline uint16_t convert_f32_to_e4m3x2(float low, float high) {
  uint16_t result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

// PTX ISA, "Data Movement and Conversion Instructions: cvt". The lower and the upper f16 of a pair to f32; exact.
__device__ inline float2 convert_f16x2_to_f32(uint32_t pair) {
  float2 result;
  asm("{\n"
      ".reg .f16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(result.x), "=f"(result.y)
      : "r"(pair));
  return result;
}

}  // namespace openmsa::cuda
