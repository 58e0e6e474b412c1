#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

// PTX ISA, "Warp Level Matrix Instructions: stmatrix". The inverse of load_matrices: lane l names row l % 8 of matrix
// l / 8 by its address, and brings bytes 4 (l % 4) to 4 (l % 4) + 3 of row l / 4 of each matrix.
__device__ inline void store_matrices(void* row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

}  // namespace openmsa::cuda
