// Host side of the plan of tiles.
#pragma once

#include <cstdint>

#include "api/stages.h"
#include "cuda/sm90/plan/tile_config.h"

namespace openmsa::cuda::sm90 {

struct TilePlanParams {
  SequenceLayout layout;
  int64_t block_size = 128;
  Tensor indices{};         // [Hi, Tq, topk] int32 or int64
  int32_t tile_tokens = 8;  // a power of 2
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
  int32_t* next_tile = nullptr;
  int64_t tiles = 0;
  int64_t capacity = 0;  // of a tile's list
};

// Queries planned at a time.
int64_t tile_plan_chunk(const TilePlanParams& params);
// For any chunk of the call.
int64_t tile_plan_workspace(const TilePlanParams& params);
TilePlan launch_tile_plan(const TilePlanParams& params);

const void* plan_tiles_kernel();  // tile_kernels.cu

}  // namespace openmsa::cuda::sm90
