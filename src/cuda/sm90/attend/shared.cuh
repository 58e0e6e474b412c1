// What a thread block of the attend kernel keeps in shared memory.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/sm90/attend/config.h"

namespace openmsa::cuda::sm90::attend {

template <typename Type, int kDim, int kBlockSize>
struct Config {
  using Element = Type;
  static constexpr int kHeadDim = kDim;
  static constexpr int kBlock = kBlockSize;
  static constexpr int kStages = stages_for(kDim, kBlockSize);
  static constexpr int kPanels = kHeadDim / kPanelColumns;
  static constexpr int kQueryBytes = kTileRows * kHeadDim * 2, kBlockBytes = kBlock * kHeadDim * 2;
};

// The tile that the copying warp has taken.
struct TileNumber {
  int32_t number;
  int32_t first;  // token of the chunk
  int32_t head;
  int32_t blocks;  // kNoMoreTiles: the end
};
inline constexpr int32_t kNoMoreTiles = -1;

// What the rows need to know of a block in a stage (TileBlock).
struct Step {
  int32_t base;
  uint32_t info;
  uint32_t members[kMostTileTokens / 32];
};

template <typename Config>
struct Shared {
  StagedRows<Config::kHeadDim, kTileRows> queries;
  StagedRows<Config::kHeadDim, Config::kBlock> keys[Config::kStages], values[Config::kStages];
  Step steps[Config::kStages];
  TileNumber tile;
  int32_t reaches[kMostTileTokens];  // of its tokens: one past the last key row that each sees
  uint64_t tile_full, tile_empty;    // the number and its queries
  uint64_t keys_full[Config::kStages], keys_empty[Config::kStages];  // the step too
  uint64_t values_full[Config::kStages], values_empty[Config::kStages];
};
// Dynamic shared memory starts at a multiple of 16 bytes only; the kernel moves up to one of 1024.
template <typename Config>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(Shared<Config>)) + 1008;
static_assert(kSharedBytes<Config<Bfloat16, 128, 128>> <= kMostSharedBytes);

}  // namespace openmsa::cuda::sm90::attend
