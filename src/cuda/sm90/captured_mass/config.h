// Captured mass: how much of a query's dense attention lies in its blocks, and how much as many blocks could hold.
#pragma once

#include <cstdint>

#include "api/stages.h"
#include "cuda/common/staged_rows.h"
#include "cuda/sm90/plan/config.h"

namespace openmsa::cuda::sm90::captured_mass {

inline constexpr int kThreads = 128;
inline constexpr int kRows = 64;  // of a tile: tokens x the query heads of an index head

struct TokenKeys {
  uint32_t sequence;  // kNoOwner: none
  int64_t k_begin, visible;
};

template <int kHeadDim, int kBlock>
struct Shared {
  StagedRows<kHeadDim, kRows> queries;
  StagedRows<kHeadDim, kBlock> keys[2];
  TokenKeys tokens[kRows];
};

// One index head and a chunk of queries.
struct MassArguments {
  SequenceLayout layout;
  int64_t block_size;
  const uint32_t* owners;  // by packed query; null: one sequence
  int64_t first_token, tokens;
  int32_t group, tile_tokens;  // query heads of the index head, kRows / group
  int64_t first_head;          // of them
  const void* q;               // the chunk's first token, the first of these heads
  int64_t q_stride_token, q_stride_head;
  const void* k;  // the KV head
  int64_t k_stride_token;
  float factor;      // of a score, in units of log 2
  const float* lse;  // [Hq, Tq], natural, over each query's whole prefix
  float* masses;     // [token of the chunk][most_blocks]: of visible blocks
  int64_t most_blocks;
  int64_t share_blocks;  // of a sequence, worked off by one thread block of the grid's y axis
};

struct SumArguments {
  SequenceLayout layout;
  int64_t block_size;
  const uint32_t* owners;
  int64_t first_token, tokens;
  int64_t head;
  IndexView indices;
  int32_t topk;
  const float* masses;
  int64_t most_blocks;
  float* share;  // [Hi, Tq]
  int64_t share_stride_head, share_stride_token;
  float* best;
  int64_t best_stride_head, best_stride_token;
};

}  // namespace openmsa::cuda::sm90::captured_mass
