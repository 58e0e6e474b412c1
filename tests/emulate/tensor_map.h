// What this emulation keeps in a CUtensorMap: the tensor's parameters as cuTensorMapEncodeTiled got them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace openmsa::emulate {

inline constexpr int kMostMapAxes = 5;

struct TensorMap {
  uint64_t base;
  uint64_t lengths[kMostMapAxes];
  uint64_t strides[kMostMapAxes - 1];  // bytes, from axis 1 on
  uint16_t box[kMostMapAxes];
  uint8_t rank;
  uint8_t element_bytes;
  uint8_t swizzle;  // CUtensorMapSwizzle
  uint8_t fill_nan;
  uint16_t seal;

  int64_t row_bytes() const { return int64_t{box[0]} * element_bytes; }
  int64_t box_bytes() const;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

TensorMap read_tensor_map(const CUtensorMap* map);

}  // namespace openmsa::emulate
