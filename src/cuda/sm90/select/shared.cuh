// What a thread block of the select kernel keeps in shared memory.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {

template <typename Type, int kHeadDimension, int kBlockSize, int kProductGroups>
struct SelectConfig {
  using Element = Type;
  static constexpr TileChoice kTile = kProductGroups == 2 ? kWideTile : kNarrowTile;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kBlock = kBlockSize;
  static constexpr int kGroups = kProductGroups;
  static constexpr int kTileRows = kGroups * kGroupRows;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Element));
  // Rows lie in slabs of at most 128 bytes, the widest swizzle.
  static constexpr int kSlabBytes = kRowBytes < 128 ? kRowBytes : 128;
  static constexpr int kSlabs = kRowBytes / kSlabBytes;
  static constexpr int kSlabElements = kSlabBytes / static_cast<int>(sizeof(Element));
  static constexpr int kProductBytes = 32;  // of a row, in one product instruction
  static constexpr int kProducts = kRowBytes / kProductBytes;
  // Products read 1/3 less shared memory with their queries in registers: 32 or 16 of them for fp8, one more than a
  // thread of the wide tile has beside 128 sums. The 64 of 16-bit rows of 128 are too many for either tile.
  static constexpr bool kQueriesInRegisters = sizeof(Element) == 1 && kGroups == 1;
  // Registers per thread after setmaxnreg, where the launch bound's 128 are too few for the products, which need 172.
  static constexpr bool kMovesRegisters = kGroups == 2;
  static constexpr int kProductRegisters = 192;
  static constexpr int kOtherRegisters = 64;
  static_assert(!kMovesRegisters ||
                128 * (kGroups * kProductRegisters + kTile.other_groups * kOtherRegisters) <= 65536);
  static constexpr int kStages = stages_for(kTile, kRowBytes);
  static constexpr int kStepBlocks = kStepKeys / kBlock;
  static constexpr int kBatchSteps = kBatchBlocks / kStepBlocks;
  static constexpr int kThreads = 128 * (kGroups + kTile.other_groups);
  static constexpr int kKeeperWarps = 4 * kTile.other_groups - 1;
  static_assert(kStepKeys % kBlock == 0 && kBatchBlocks % kStepBlocks == 0);
};

template <typename Config>
struct SelectShared {
  alignas(1024) unsigned char queries[Config::kSlabs][Config::kTileRows][Config::kSlabBytes];
  alignas(1024) unsigned char keys[Config::kStages][Config::kSlabs][kStepKeys][Config::kSlabBytes];
  // Lists of a tile's rows, a column each (List); a score of 0 is an empty slot.
  uint32_t scores[Config::kTile.most_topk][Config::kTileRows];
  int32_t blocks[Config::kTile.most_topk][Config::kTileRows];
  uint32_t maxima[kRing][kBatchBlocks][Config::kTileRows];
  WorkUnit units[kUnitRing];
  uint64_t queries_full, queries_empty;
  uint64_t keys_full[Config::kStages], keys_empty[Config::kStages];
  uint64_t maxima_full[kRing], maxima_empty[kRing];
  uint64_t units_full[kUnitRing], units_empty[kUnitRing];
};

inline constexpr int kMostSharedBytes = 227 * 1024;
// Dynamic shared memory starts at a multiple of 16 bytes only; the kernel moves up to one of 1024.
template <typename Config>
inline constexpr int kSharedBytes = static_cast<int>(sizeof(SelectShared<Config>)) + 1024;
static_assert(kSharedBytes<SelectConfig<Bfloat16, 128, 128, 2>> <= kMostSharedBytes);
static_assert(kSharedBytes<SelectConfig<Bfloat16, 128, 128, 1>> <= kMostSharedBytes);
static_assert(kSharedBytes<SelectConfig<Float8E4m3, 128, 128, 2>> <= kMostSharedBytes);
static_assert(kSharedBytes<SelectConfig<Float8E4m3, 128, 128, 1>> <= kMostSharedBytes);

}  // namespace openmsa::cuda::sm90
