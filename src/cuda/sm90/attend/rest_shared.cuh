// What a thread block of the rest kernel keeps in shared memory.
#pragma once

#include <cstdint>

#include "cuda/sm90/attend/shared.cuh"

namespace openmsa::cuda::sm90::attend {

// Rows that share a block. 0 tokens end their group's work.
struct RestTile {
  int32_t tokens;
  int32_t buffer;
  uint32_t phase;
  uint32_t items[kMostRestTokens];
};

template <typename Config>
struct RestShared {
  StagedRows<Config::kHeadDim, Config::kBlock> keys[kRestBuffers], values[kRestBuffers];
  StagedRows<Config::kHeadDim, kGroupRows> queries[kRestSlots];
  RestTile tiles[kRestSlots];
  // A tile is there; its block is read no more; its results have left.
  uint64_t full[kRestSlots], used[kRestSlots], empty[kRestSlots];
  uint64_t block_full[kRestBuffers];
};
template <typename Config>
inline constexpr int kRestSharedBytes = static_cast<int>(sizeof(RestShared<Config>)) + 1008;
static_assert(kRestSharedBytes<Config<Bfloat16, 128, 128>> <= kMostSharedBytes);

}  // namespace openmsa::cuda::sm90::attend
