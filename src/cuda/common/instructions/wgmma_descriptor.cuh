// Where the operands of warpgroup products lie in shared memory: PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions: Matrix Descriptor Format".
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

// Matrix descriptor of a K-major operand whose rows of 128 bytes are stored one after the other with the 128-byte
// swizzle (16-byte piece c of row r lies at c ^ (r % 8)), or whose rows of 64 bytes are stored so with the 64-byte
// swizzle (c ^ (r / 2 % 4)). `start` is aligned to 8 rows, or that plus a multiple of 32 bytes to begin at a later k.
template <int kRowBytes = 128>
__device__ inline uint64_t wgmma_descriptor(const void* start) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr uint64_t kLeadingOffset = 1;  // not used by these layouts
  constexpr uint64_t kStrideOffset = 8 * kRowBytes / 16;
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  return static_cast<uint64_t>((shared_address(start) & 0x3ffffu) >> 4) | (kLeadingOffset << 16) |
         (kStrideOffset << 32) | (kSwizzle << 62);
}

// Matrix descriptor of an operand whose rows run along k and hold 64 elements of 2 bytes of the other dimension, with
// the 128-byte swizzle: `panel_bytes` from 64 such elements to the next 64. `start` is aligned to 8 rows.
__device__ inline uint64_t wgmma_descriptor_transposed(const void* start, int panel_bytes) {
  constexpr uint64_t kStrideOffset = 8 * 128 / 16;  // eight rows of k
  constexpr uint64_t kSwizzle = 1;
  return static_cast<uint64_t>((shared_address(start) & 0x3ffffu) >> 4) |
         (static_cast<uint64_t>(panel_bytes / 16) << 16) | (kStrideOffset << 32) | (kSwizzle << 62);
}

}  // namespace openmsa::cuda
