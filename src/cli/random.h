// Random tensors that are the same on every machine.
#pragma once

#include <cstdint>

#include "cli/device.h"

namespace openmsa::cli {

// A host array of a floating-point type with numbers of mean 0 and variance 1, evenly spread.
Array random_array(int32_t dtype, const Shape& shape, uint64_t seed);
// With the integers -2 to 2: sums of their products are exact in float32, so that every backend ranks them alike.
Array random_integers(int32_t dtype, const Shape& shape, uint64_t seed);

}  // namespace openmsa::cli
