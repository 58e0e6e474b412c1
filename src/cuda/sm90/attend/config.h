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

// Named barriers, one for each warpgroup; __syncthreads has number 0.
inline constexpr int kFirstGroupBarrier = 1;

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
  int32_t first_head, heads;  // index heads at work; tiles count from the first
  int32_t index_heads;        // of the call
  int32_t kv_heads;
  int32_t group;               // query heads of an index head: a power of 2
  int32_t tile_tokens;         // kTileRows / group
  int32_t tokens;              // of the chunk
  int32_t first_token, tiles;  // the chunk's
  int32_t capacity;            // of a tile's list

  const TileBlock* blocks;
  const uint32_t* more_members;
  int32_t more_words;  // beside each block
  const int32_t* counts;
  const int32_t* all_counts;
  const int32_t* reaches;
  uint8_t* suspects;
  TileHeader* header;

  float factor;  // of a score, in units of log 2

  void* out;  // the chunk's first token
  int64_t out_stride_token, out_stride_head;
  float* lse;  // the same, or null
  int64_t lse_stride_head, lse_stride_token;
};

// ---- The rest: blocks that few tokens of a tile selected, whole ones, read once for all of their members ----

// Tiles of 64 rows that share a block: tokens x the query heads of an index head, gathered. Each warpgroup takes every
// second one.
inline constexpr int kRestSlots = 4;
inline constexpr int kRestBuffers = 2;     // of blocks
inline constexpr int kLeastRestGroup = 8;  // rows of a token fill the swizzle's 8 rows
inline constexpr int kMostRestTokens = kGroupRows / kLeastRestGroup;

struct RestArguments {
  CUtensorMap queries;       // {D, head, token}, one token's rows of an index head
  CUtensorMap keys, values;  // as in Arguments
  bool paged;
  int32_t first_head, heads, index_heads, kv_heads, group;
  int32_t topk;
  int32_t first_token;
  const uint32_t* places;  // see plan/tile_launch.h
  const uint32_t* items;
  uint32_t count, no_place;
  float factor;
  // [query of the chunk, head, slot]: out of the block alone, normalised: panels of `group` rows of 128 bytes with the
  // 128-byte swizzle. And of each of its rows the log-sum-exp, in units of log 2.
  void* partials;
  float* partial_lses;  // [.., group]
};

// out and lse of the tiles' own blocks, joined by the partials of the rest.
inline constexpr int kJoinThreads = 128;
inline constexpr int kJoinTokens = 8;  // of an index head that a thread block joins at a time: 128 rows of 16

struct JoinArguments {
  int32_t heads, group, head_dim, topk;
  int64_t tokens;
  const uint64_t* rest_slots;
  const void* partials;
  const float* partial_lses;
  void* out;  // the chunk's first token, the first head
  int64_t out_stride_token, out_stride_head;
  const float* tile_lse;  // natural
  int64_t tile_lse_stride_head, tile_lse_stride_token;
  float* lse;  // or null
  int64_t lse_stride_head, lse_stride_token;
};

// Values that are not finite reach, as 0 x NaN, the rows of a tile that do not see them. A tile is marked when that may
// have happened, and its rows are then formed anew from what they see alone.
inline constexpr int kRepairThreads = 128;
inline constexpr int kMostRepairKeys = 64 * 128;  // of a row: topk blocks

struct RepairArguments {
  Arguments attend;
  int32_t head_dim, block_size;
  const void* q;  // the chunk's first token
  int64_t q_stride_token, q_stride_head;
  const void* k;
  int64_t k_stride_page, k_stride_token, k_stride_head;
  const void* v;
  int64_t v_stride_page, v_stride_token, v_stride_head;
};

}  // namespace openmsa::cuda::sm90::attend
