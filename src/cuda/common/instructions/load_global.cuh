#pragma once

#include <cstdint>

namespace openmsa::cuda {

// PTX ISA, "Data Movement and Conversion Instructions: ld.global.nc". 16 bytes through the read-only path; `address` is
// a multiple of 16, and nothing writes there while the kernel runs.
__device__ inline uint4 load_global_read_only(const void* address) {
  uint4 value;
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(address));
  return value;
}

}  // namespace openmsa::cuda
