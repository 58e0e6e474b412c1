#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

// PTX ISA, "Warp Level Matrix Instructions: ldmatrix". Four matrices of 8 rows of 16 bytes; lane l names row l % 8 of
// matrix l / 8 by its address. Lane l gets bytes 4 (l % 4) to 4 (l % 4) + 3 of row l / 4 of each matrix.
__device__ inline void load_matrices(uint32_t (&words)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace openmsa::cuda
