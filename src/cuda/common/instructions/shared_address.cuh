#pragma once

#include <cstdint>

namespace openmsa::cuda {

// PTX ISA, "Data Movement and Conversion Instructions: cvta". The 32-bit address that instructions on shared memory
// take.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace openmsa::cuda
