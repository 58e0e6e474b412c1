// Storage conversions: every value of each type, and every place where rounding changes.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "api/numeric.h"

namespace openmsa {
namespace {

static_assert(float_to_bfloat16(1.0F) == 0x3f80 && float_to_float16(1.0F) == 0x3c00 &&
              float_to_float8_e4m3(1.0F) == 0x38);

struct Format {
  const char* name;
  int exponent_bits, mantissa_bits;
  bool has_infinity;
  float (*decode)(uint32_t);
  uint32_t (*encode)(float);

  uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
  uint32_t largest() const { return has_infinity ? (((1u << exponent_bits) - 1) << mantissa_bits) - 1 : sign() - 2; }

  // From the definition of the format: fraction and exponent.
  double value(uint32_t magnitude) const {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const auto field = static_cast<int>(magnitude >> mantissa_bits);
    const double fraction = std::ldexp(static_cast<double>(magnitude & ((1u << mantissa_bits) - 1)), -mantissa_bits);
    return field == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, field - bias);
  }
};

const Format kFormats[] = {
    {"bfloat16", 8, 7, true, [](uint32_t bits) { return bfloat16_to_float(static_cast<uint16_t>(bits)); },
     [](float x) -> uint32_t { return float_to_bfloat16(x); }},
    {"float16", 5, 10, true, [](uint32_t bits) { return float16_to_float(static_cast<uint16_t>(bits)); },
     [](float x) -> uint32_t { return float_to_float16(x); }},
    {"float8_e4m3", 4, 3, false, [](uint32_t bits) { return float8_e4m3_to_float(static_cast<uint8_t>(bits)); },
     [](float x) -> uint32_t { return float_to_float8_e4m3(x); }},
};

class ReferenceNumeric : public ::testing::TestWithParam<Format> {};

TEST_P(ReferenceNumeric, EveryFiniteValueKeepsItsBits) {
  const Format& format = GetParam();
  for (uint32_t magnitude = 0; magnitude <= format.largest(); ++magnitude) {
    for (const uint32_t sign : {0u, format.sign()}) {
      const float value = format.decode(sign | magnitude);
      ASSERT_EQ(value, static_cast<float>(sign != 0 ? -format.value(magnitude) : format.value(magnitude))) << magnitude;
      ASSERT_EQ(std::signbit(value), sign != 0);
      ASSERT_EQ(format.encode(value), sign | magnitude);
    }
  }
}

TEST_P(ReferenceNumeric, RoundsToNearestTiesToEven) {
  const Format& format = GetParam();
  for (uint32_t below = 0; below < format.largest(); ++below) {
    const double middle = (format.value(below) + format.value(below + 1)) / 2;
    const auto tie = static_cast<float>(middle);
    if (static_cast<double>(tie) != middle) continue;  // between float32 subnormals there is no middle to test
    for (const uint32_t sign : {0u, format.sign()}) {
      const auto encode = [&](float x) { return format.encode(sign != 0 ? -x : x); };
      ASSERT_EQ(encode(tie), sign | (below % 2 == 0 ? below : below + 1)) << below;
      ASSERT_EQ(encode(std::nextafter(tie, 0.0F)), sign | below);
      ASSERT_EQ(encode(std::nextafter(tie, INFINITY)), sign | (below + 1));
    }
  }
}

TEST_P(ReferenceNumeric, EncodingRisesWithTheValue) {
  const Format& format = GetParam();
  uint32_t last = 0;
  for (uint64_t bits = 0; bits <= 0x7f800000u; bits += 1021) {
    const uint32_t encoded = format.encode(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    ASSERT_GE(encoded, last) << bits;
    last = encoded;
  }
}

TEST_P(ReferenceNumeric, Overflow) {
  const Format& format = GetParam();
  const double largest = format.value(format.largest());
  const double step = largest - format.value(format.largest() - 1);
  const auto limit = static_cast<float>(largest + step / 2);  // from here on the value is nearer to the next power
  const uint32_t beyond = format.has_infinity ? format.largest() + 1 : format.largest();
  EXPECT_EQ(format.encode(std::nextafter(limit, 0.0F)), format.largest());
  for (const float x : {limit, 2 * limit, INFINITY}) {
    EXPECT_EQ(format.encode(x), beyond);
    EXPECT_EQ(format.encode(-x), format.sign() | beyond);
  }
  if (format.has_infinity) {
    EXPECT_EQ(format.decode(beyond), INFINITY);
    EXPECT_EQ(format.decode(format.sign() | beyond), -INFINITY);
  }
}

TEST_P(ReferenceNumeric, NanStaysNan) {
  const Format& format = GetParam();
  const uint32_t first = format.largest() + (format.has_infinity ? 2 : 1);
  for (uint32_t magnitude = first; magnitude < format.sign(); ++magnitude) {
    EXPECT_TRUE(std::isnan(format.decode(magnitude)));
    EXPECT_TRUE(std::isnan(format.decode(format.sign() | magnitude)));
  }
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7f802000u}) {
    EXPECT_TRUE(std::isnan(format.decode(format.encode(std::bit_cast<float>(bits))))) << bits;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, ReferenceNumeric, ::testing::ValuesIn(kFormats),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace openmsa
