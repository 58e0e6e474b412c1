// Emulates src/cuda/common/instructions/bulk_tensor.cuh.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"
#include "emulate/copies.h"

namespace openmsa::cuda {

inline void prefetch_tensor_map(const CUtensorMap* /*map*/) {}

template <typename... Coordinates>
void copy_box(void* shared, const CUtensorMap* map, uint64_t* barrier, Coordinates... coordinates) {
  emulate::copy_box(shared, map, barrier, std::array{static_cast<int32_t>(coordinates)...});
}

template <typename... Coordinates>
void prefetch_box(const CUtensorMap* /*map*/, Coordinates... /*coordinates*/) {}

}  // namespace openmsa::cuda
