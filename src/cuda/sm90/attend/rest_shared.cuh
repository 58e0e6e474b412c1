// What a thread block of the rest kernel keeps in shared memory.
#pragma once

#include <cstdint>

#include "cuda/sm90/attend/shared.cuh"

namespace openmsa::cuda::sm90::attend {

// Rows that share a block.
struct RestTile {
  int32_t tokens;  // kRestFlush, kRestEnd: none
  int32_t buffer;
  uint32_t phase;
  uint32_t
      partials[kMostRestTokens];  // slots of the results, [query, head, slot] counted through; kNoPartial: no token
};
inline constexpr int32_t kRestFlush = 0;  // finish the tile before
inline constexpr int32_t kRestEnd = -1;   // and that was the last one
inline constexpr uint32_t kNoPartial = ~uint32_t{0};

// A tile's values are in use for one more tile than its queries, so tiles at work pass by twice the slots (rest.cuh).
inline constexpr int kRestUses = 2 * kRestSlots;

// Results on their way out: each warp's 16 rows, as the partials hold them.
template <typename Config>
struct alignas(1024) RestResults {
  unsigned char warps[4][16 * Config::kHeadDim * 2];
};

template <typename Config>
struct RestShared {
  StagedRows<Config::kHeadDim, Config::kBlock> keys[kRestBuffers], values[kRestBuffers];
  StagedRows<Config::kHeadDim, kGroupRows> queries[kRestSlots];
  RestResults<Config> results[kGroups];
  RestTile tiles[kRestSlots];
  uint64_t full[kRestSlots], empty[kRestSlots];  // a tile is there; its queries and its RestTile are read no more
  uint64_t used[kRestUses];                      // a tile's block is read no more
  uint64_t block_full[kRestBuffers];
};
template <typename Config>
inline constexpr int kRestSharedBytes = static_cast<int>(sizeof(RestShared<Config>)) + 1008;
static_assert(kRestSharedBytes<Config<Bfloat16, 128, 128>> <= kMostSharedBytes);

}  // namespace openmsa::cuda::sm90::attend
