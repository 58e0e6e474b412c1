// Emulates src/cuda/common/instructions/load_matrix.cuh.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"
#include "emulate/device.h"

namespace openmsa::cuda {

inline void load_matrices(uint32_t (&words)[4], const void* row) {
  const uint64_t* const rows = emulate::meet_lanes(~0u, reinterpret_cast<uintptr_t>(row), "ldmatrix");
  const int lane = emulate::lane_id();
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto* const from = reinterpret_cast<const unsigned char*>(rows[8 * matrix + lane / 4]);
    std::memcpy(&words[matrix], from + lane % 4 * 4, 4);
  }
}

}  // namespace openmsa::cuda
