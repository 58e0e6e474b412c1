// The storage types in integer arithmetic: float32 <-> bfloat16, float16 and float8 e4m3 ("fn": no infinity, largest
// value 448). Rounding is to nearest, ties to even; NaN stays NaN; float16 overflows to infinity, e4m3 saturates.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace openmsa {

namespace numeric_detail {

// Encodes the magnitude of a float32 (its bits without the sign, not NaN) in a format with `mantissa` explicit bits and
// smallest normal exponent `min_exponent`. Sizes past the format's largest exponent continue the count: the caller
// caps.
template <int mantissa, int min_exponent>
constexpr uint32_t encode_magnitude(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 23) - 127;
  if (exponent == -127) return 0;  // float32 subnormals are far below half of the smallest step
  const uint32_t significand = (bits & 0x7fffffu) | 0x800000u;
  const int shift = 23 - mantissa + std::max(0, min_exponent - exponent);
  if (shift > 24) return 0;  // less than half of the smallest step
  const uint32_t to_even = (significand >> shift) & 1u;
  const uint32_t rounded = (significand + (1u << (shift - 1)) - 1u + to_even) >> shift;
  // `rounded` holds the leading one of a normal number, which counts as one step of the exponent.
  const auto steps = static_cast<uint32_t>(std::max(0, exponent - min_exponent));
  return (steps << mantissa) + rounded;
}

// The value of an encoded magnitude that is finite.
template <int mantissa, int min_exponent>
constexpr float decode_magnitude(uint32_t magnitude) {
  const uint32_t field = magnitude >> mantissa;
  const uint32_t fraction = magnitude & ((1u << mantissa) - 1u);
  if (field == 0) {
    const auto step = std::bit_cast<float>(static_cast<uint32_t>(127 + min_exponent - mantissa) << 23);
    return static_cast<float>(fraction) * step;
  }
  const uint32_t exponent = field + static_cast<uint32_t>(126 + min_exponent);
  return std::bit_cast<float>((exponent << 23) | (fraction << (23 - mantissa)));
}

constexpr float with_sign(float magnitude, bool negative) { return negative ? -magnitude : magnitude; }

constexpr uint32_t kFloatInfinity = 0x7f800000u;

}  // namespace numeric_detail

constexpr float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

constexpr uint16_t float_to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > numeric_detail::kFloatInfinity) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float float16_to_float(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    return std::bit_cast<float>(sign | numeric_detail::kFloatInfinity | ((magnitude & 0x3ffu) << 13));
  }
  return numeric_detail::with_sign(numeric_detail::decode_magnitude<10, -14>(magnitude), (bits & 0x8000u) != 0);
}

constexpr uint16_t float_to_float16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > numeric_detail::kFloatInfinity) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  }
  return static_cast<uint16_t>(sign | std::min(numeric_detail::encode_magnitude<10, -14>(magnitude), 0x7c00u));
}

constexpr float float8_e4m3_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  const bool negative = (bits & 0x80u) != 0;
  if (magnitude == 0x7fu) return std::bit_cast<float>(negative ? 0xffc00000u : 0x7fc00000u);
  return numeric_detail::with_sign(numeric_detail::decode_magnitude<3, -6>(magnitude), negative);
}

constexpr uint8_t float_to_float8_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > numeric_detail::kFloatInfinity) return static_cast<uint8_t>(sign | 0x7fu);
  return static_cast<uint8_t>(sign | std::min(numeric_detail::encode_magnitude<3, -6>(magnitude), 0x7eu));
}

}  // namespace openmsa
