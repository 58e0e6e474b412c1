// Attend: tiles, constants, what the launch reads and writes. docs/kernels/attend.md has the schedule.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "api/stages.h"
#include "cuda/common/staged_rows.h"
#include "cuda/sm90/plan/tile_config.h"

namespace openmsa::cuda::sm90::attend {

// Two warpgroups of 64 rows each, and one that copies.
inline constexpr int kGroups = 2;
inline constexpr int kGroupRows = kTileRows / kGroups;
inline constexpr int kThreads = (kGroups + 1) * 128;
inline constexpr int kConsumerWarps = 4 * kGroups;
// 64 scores, 64 sums and 32 words of weights a thread.
inline constexpr int kConsumerRegisters = 232, kCopyRegisters = 40;
static_assert(128 * (kGroups * kConsumerRegisters + kCopyRegisters) <= 65536);

inline constexpr int kMostSharedBytes = 227 * 1024;
inline constexpr int kMostStages = 6;
// Blocks of keys and values in flight: a fourth of 128 keys and 128 columns passes a thread block's shared memory.
constexpr int stages_for(int head_dim, int block) {
  const int stages = 3 * (128 * 128) / (head_dim * block);
  return stages < kMostStages ? stages : kMostStages;
}

struct Arguments {
  CUtensorMap queries;       // {D, head, token}
  CUtensorMap keys, values;  // {D, KV head, token} or paged {D, KV head, row, page}
  bool paged;
  int32_t heads, kv_heads;     // index heads, KV heads
  int32_t group;               // query heads of an index head: a power of 2
  int32_t tile_tokens;         // kTileRows / group
  int32_t tokens;              // of the chunk
  int32_t first_token, tiles;  // the chunk's
  int32_t capacity;            // of a tile's list

  const TileBlock* blocks;
  const uint32_t* more_members;
  int32_t more_words;  // beside each block
  const int32_t* counts;
  const int32_t* reaches;
  int32_t* next_tile;

  float factor;  // of a score, in units of log 2

  void* out;                                 // the chunk's first token
  int64_t out_stride_token, out_stride_head;
  float* lse;                                // the same, or null
  int64_t lse_stride_head, lse_stride_token;
};

}  // namespace openmsa::cuda::sm90::attend
