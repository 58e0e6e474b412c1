// Rows of one head in storage, as kernels read them.
#pragma once

#include <cstdint>

#include "openmsa/openmsa.hpp"

namespace openmsa::cpu {

// Row r: `columns` contiguous elements at data + r * stride, worth factor times what is stored.
struct StoredRows {
  const void* data = nullptr;
  int64_t stride = 0;  // elements between rows; any sign
  int64_t columns = 0;
  DataType dtype = OPENMSA_FLOAT32;
  float factor = 1.0f;
};

// Rows of one head that a kernel writes.
struct OutputRows {
  void* data = nullptr;
  int64_t stride = 0;
  int64_t columns = 0;
  DataType dtype = OPENMSA_FLOAT32;
};

}  // namespace openmsa::cpu
