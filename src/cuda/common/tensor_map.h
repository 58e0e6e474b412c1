// Tensor maps: what the bulk copy engine knows of a tensor. They hold an address, lengths and strides, no values, so a
// graph that captured one may be replayed over memory that changed.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>

namespace openmsa::cuda {

// An axis of a tensor map, first the contiguous one.
struct TensorMapAxis {
  int64_t length;  // elements; at least 1
  int64_t stride;  // bytes; not read for the contiguous axis. Not negative: see forward_axis
  int32_t box;     // elements that one copy takes
};

// `name` is the argument that errors name. Rows of the box are box x element_bytes wide: 64 or 128 bytes, and arrive in
// the swizzle of that width.
CUtensorMap make_tensor_map(const char* name, const void* base, int element_bytes, std::span<const TensorMapAxis> axes);

}  // namespace openmsa::cuda
