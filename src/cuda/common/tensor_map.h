// Tensor maps: what the bulk copy engine knows of a tensor. They hold an address, lengths and strides, no values, so a
// graph that captured one may be replayed over memory that changed.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

#include "openmsa/openmsa.hpp"

namespace openmsa::cuda {

// An axis of a tensor map, first the contiguous one.
struct TensorMapAxis {
  int64_t length;  // elements; at least 1
  int64_t stride;  // bytes; not read for the contiguous axis. The engine knows none that is negative
  int32_t box;     // elements that one copy takes
};

// Axis `axis` of a tensor. The stride of an axis with at most one element is 0, whatever the tensor says.
TensorMapAxis tensor_map_axis(const Tensor& tensor, int axis, int32_t box);

// `name` is the argument that errors name. Rows of the box are box x element_bytes wide: 64 or 128 bytes, and arrive in
// the swizzle of that width.
CUtensorMap make_tensor_map(const char* name, const void* base, int element_bytes, std::span<const TensorMapAxis> axes);

}  // namespace openmsa::cuda
