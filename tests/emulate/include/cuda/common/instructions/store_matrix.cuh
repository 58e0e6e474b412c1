// Emulates src/cuda/common/instructions/store_matrix.cuh.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"
#include "emulate/device.h"

namespace openmsa::cuda {

inline void store_matrices(void* row, const uint32_t (&words)[4]) {
  const uint64_t* const rows = emulate::meet_lanes(~0u, reinterpret_cast<uintptr_t>(row), "stmatrix");
  const int lane = emulate::lane_id();
  for (int matrix = 0; matrix < 4; ++matrix) {
    auto* const to = reinterpret_cast<unsigned char*>(rows[8 * matrix + lane / 4]);
    std::memcpy(to + lane % 4 * 4, &words[matrix], 4);
  }
}

}  // namespace openmsa::cuda
