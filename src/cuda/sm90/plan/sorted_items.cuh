// Items sorted by place, shared out among thread blocks.
#pragma once

#include <cstdint>

#include "cuda/sm90/plan/item.cuh"

namespace openmsa::cuda::sm90 {

// The items with a place, which come first. Each warp finds out for itself, 32 guesses at a time.
__device__ inline uint32_t count_placed(const uint32_t* places, uint32_t count, uint32_t no_place, int lane) {
  uint32_t low = 0, high = count;
  while (low < high) {
    const uint32_t step = (high - low + 31) / 32;
    const uint32_t at = low + lane * step;
    const unsigned placed = __ballot_sync(~0u, at < high && places[at] < no_place);
    if (placed == 0) break;
    low += (31 - __clz(static_cast<int>(placed))) * step + 1;
    high = min(high, low + step - 1);
  }
  return low;
}

// This thread block's part of the numbers [begin, end).
struct Part {
  uint32_t begin, end;
};
__device__ inline Part part_of(uint32_t begin, uint32_t end) {
  const uint64_t count = end - begin;
  return {begin + static_cast<uint32_t>(count * blockIdx.x / gridDim.x),
          begin + static_cast<uint32_t>(count * (blockIdx.x + 1) / gridDim.x)};
}

}  // namespace openmsa::cuda::sm90
