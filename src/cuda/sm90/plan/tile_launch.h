// Host side of the plan of tiles.
#pragma once

#include <cstdint>

#include "api/stages.h"
#include "cuda/sm90/plan/tile_config.h"

namespace openmsa::cuda::sm90 {

struct TilePlanParams {
  SequenceLayout layout;
  int64_t block_size = 128;
  Tensor indices{};                   // [Hi, Tq, topk] int32 or int64
  int32_t first_head = 0, heads = 1;  // index heads
  int32_t tile_tokens = 8;            // a power of 2
  int32_t least_members = 0;          // TileArguments
  int32_t most_alone = 0;             // the same
  int64_t most_tokens = 0;            // of a chunk, beside the plan's own bound; a multiple of tile_tokens
  // The chunk: at most tile_plan_chunk() queries, from a multiple of tile_tokens on.
  int64_t first_token = 0, tokens = 0;
  int32_t first_next = 0;
  void* stream = nullptr;
  void* workspace = nullptr;  // tile_plan_workspace() bytes, aligned to 256
};

// What the chunk's tiles attend to (tile_config.h), on the device; tile h x tiles + i is index head h's tile i.
struct TilePlan {
  const TileBlock* blocks = nullptr;
  const uint32_t* more_members = nullptr;
  const int32_t* counts = nullptr;
  const int32_t* reaches = nullptr;
  const int32_t* all_counts = nullptr;
  uint8_t* suspects = nullptr;
  TileHeader* header = nullptr;
  int64_t tiles = 0;
  int64_t capacity = 0;  // of a tile's list
  // With least_members > 0: the members of rest blocks as Plan (launch.h) has them.
  const uint32_t* places = nullptr;
  const uint32_t* items = nullptr;
  const uint64_t* rest_slots = nullptr;
  int64_t count = 0;
  uint32_t no_place = 0;
};

// Queries planned at a time.
int64_t tile_plan_chunk(const TilePlanParams& params);
// For any chunk of the call.
int64_t tile_plan_workspace(const TilePlanParams& params);
TilePlan launch_tile_plan(const TilePlanParams& params);

const void* plan_tiles_kernel();  // tile_kernels.cu

}  // namespace openmsa::cuda::sm90
