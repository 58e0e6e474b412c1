// Emulates src/cuda/common/instructions/convert.cuh.
#pragma once

#include <cstdint>

#include "api/numeric.h"

namespace openmsa::cuda {

inline uint32_t convert_e4m3x2_to_f16x2(uint16_t pair) {
  const auto half = [](uint16_t byte) {
    return static_cast<uint32_t>(float_to_float16(float8_e4m3_to_float(static_cast<uint8_t>(byte))));
  };
  return half(pair & 0xff) | half(pair >> 8) << 16;
}

inline uint32_t convert_f32_to_bf16x2(float low, float high) {
  return float_to_bfloat16(low) | static_cast<uint32_t>(float_to_bfloat16(high)) << 16;
}
inline uint32_t convert_f32_to_f16x2(float low, float high) {
  return float_to_float16(low) | static_cast<uint32_t>(float_to_float16(high)) << 16;
}
inline uint16_t convert_f32_to_e4m3x2(float low, float high) {
  return static_cast<uint16_t>(float_to_float8_e4m3(low) | float_to_float8_e4m3(high) << 8);
}

inline float2 convert_f16x2_to_f32(uint32_t pair) {
  return {float16_to_float(static_cast<uint16_t>(pair)), float16_to_float(static_cast<uint16_t>(pair >> 16))};
}

}  // namespace openmsa::cuda
