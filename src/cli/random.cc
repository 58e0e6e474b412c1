#include "cli/random.h"

#include "api/dtype.h"
#include "api/numeric.h"
#include "host/parallel.h"

namespace openmsa::cli {
namespace {

// A counter's hash (SplitMix64): element i depends on the seed and i alone, so that threads share the work.
uint64_t hash(uint64_t seed, int64_t i) {
  uint64_t x = seed * 0xD1342543DE82EF95U + (static_cast<uint64_t>(i) + 1) * 0x9E3779B97F4A7C15U;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return x ^ x >> 31;
}

void store(const Array& array, int64_t i, float value) {
  switch (array.tensor.dtype) {
    case OPENMSA_FLOAT32:
      array.data<float>()[i] = value;
      return;
    case OPENMSA_FLOAT16:
      array.data<uint16_t>()[i] = float_to_float16(value);
      return;
    case OPENMSA_BFLOAT16:
      array.data<uint16_t>()[i] = float_to_bfloat16(value);
      return;
    default:
      array.data<uint8_t>()[i] = float_to_float8_e4m3(value);
  }
}

template <typename Value>
Array filled(int32_t dtype, const Shape& shape, uint64_t seed, const Value& value) {
  Array array = make_array(host_device(), dtype, shape);
  constexpr int64_t kPiece = 1 << 16;
  const int64_t elements = array.elements();
  host::parallel_for((elements + kPiece - 1) / kPiece, [&](int64_t piece) {
    const int64_t end = std::min(elements, (piece + 1) * kPiece);
    for (int64_t i = piece * kPiece; i < end; ++i) store(array, i, value(hash(seed, i)));
  });
  return array;
}

}  // namespace

Array random_array(int32_t dtype, const Shape& shape, uint64_t seed) {
  constexpr float kWidth = 3.4641016F;  // sqrt(12): variance 1
  return filled(dtype, shape, seed,
                [](uint64_t bits) { return kWidth * (static_cast<float>(bits >> 40) * 0x1p-24F - 0.5F); });
}

Array random_integers(int32_t dtype, const Shape& shape, uint64_t seed) {
  return filled(dtype, shape, seed, [](uint64_t bits) { return static_cast<float>(bits % 5) - 2; });
}

}  // namespace openmsa::cli
