// The copying warp: takes tiles, and brings their queries and the blocks of keys and values that they selected.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/bulk_tensor.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/attend/shared.cuh"

namespace openmsa::cuda::sm90::attend {

template <typename Config>
__device__ inline void copy_block(const CUtensorMap& map, uint64_t* full,
                                  StagedRows<Config::kHeadDim, Config::kBlock>& to, bool paged, int32_t kv_head,
                                  const TileBlock& block) {
  barrier_arrive_expect(full, Config::kBlockBytes);
#pragma unroll
  for (int panel = 0; panel < Config::kPanels; ++panel) {
    if (paged) {
      copy_box(to.panels[panel], &map, full, panel * kPanelColumns, kv_head, 0, block.page);
    } else {
      copy_box(to.panels[panel], &map, full, panel * kPanelColumns, kv_head, block.base);
    }
  }
}

// A tile's list, 32 blocks at a time, the next 32 on their way.
class BlockList {
 public:
  __device__ BlockList(const TileBlock* blocks, int32_t count, int lane)
      : blocks_(blocks), count_(count), lane_(lane), ahead_(load(0)) {}

  // For ascending numbers, by the whole warp.
  __device__ TileBlock block(int32_t number) {
    if (number % 32 == 0) {
      window_ = ahead_;
      ahead_ = load(number + 32);
    }
    const int from = number % 32;
    TileBlock block;
    block.base = __shfl_sync(~0u, window_.base, from);
    block.page = __shfl_sync(~0u, window_.page, from);
    block.info = __shfl_sync(~0u, window_.info, from);
    block.members = __shfl_sync(~0u, window_.members, from);
    return block;
  }

 private:
  __device__ TileBlock load(int32_t first) const {
    return first + lane_ < count_ ? blocks_[first + lane_] : TileBlock{};
  }

  const TileBlock* blocks_;
  int32_t count_;
  int lane_;
  TileBlock ahead_, window_{};
};

template <typename Config>
class TileCopies {
 public:
  __device__ TileCopies(const Arguments& args, Shared<Config>& shared)
      : args_(args), shared_(shared), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void copy_tiles() {
    if (lane_ == 0) {
      prefetch_tensor_map(&args_.queries);
      prefetch_tensor_map(&args_.keys);
      prefetch_tensor_map(&args_.values);
    }
    const int32_t tiles = args_.tiles * args_.heads;
    int32_t number = static_cast<int32_t>(blockIdx.x);
    for (uint32_t phase = 0; number < tiles; phase ^= 1) {
      int32_t next = 0;
      if (lane_ == 0) next = atomicAdd(&args_.header->next, 1);
      copy_tile(number, phase);
      number = __shfl_sync(~0u, next, 0);
    }
    // The end, of which the rows learn as of a tile.
    barrier_wait(&shared_.tile_empty, last_phase_);
    if (lane_ == 0) {
      shared_.tile = {number, 0, 0, kNoMoreTiles};
      barrier_arrive(&shared_.tile_full);
    }
  }

 private:
  // Blocks of a tile that are on their way before its queries, whose place the rows of the tile before hold longest.
  static constexpr int32_t kAhead = Config::kStages - 2;

  __device__ void copy_tile(int32_t number, uint32_t phase) {
    const int32_t count = args_.counts[number];
    const int32_t first = number % args_.tiles * args_.tile_tokens;
    list_ = static_cast<int64_t>(number) * args_.capacity;
    head_ = number / args_.tiles;
    kv_head_ = (args_.first_head + head_) * args_.kv_heads / args_.index_heads;
    int32_t reaches[kMostTileTokens / 32];
#pragma unroll
    for (int i = 0; i < kMostTileTokens / 32; ++i) {
      const int32_t token = lane_ + 32 * i;
      reaches[i] = token < args_.tile_tokens && first + token < args_.tokens ? args_.reaches[first + token] : 0;
    }
    if (lane_ == 0) {
      for (int panel = 0; panel < Config::kPanels; ++panel) {
        prefetch_box(&args_.queries, panel * kPanelColumns, (args_.first_head + head_) * args_.group,
                     args_.first_token + first);
      }
    }
    BlockList blocks(args_.blocks + list_, count, lane_);
    const int32_t ahead = min(count, kAhead);
    for (int32_t i = 0; i < ahead; ++i) copy_step(i, blocks.block(i));
    barrier_wait(&shared_.tile_empty, phase ^ 1);
    last_phase_ = phase;
#pragma unroll
    for (int i = 0; i < kMostTileTokens / 32; ++i) {
      if (lane_ + 32 * i < args_.tile_tokens) shared_.reaches[lane_ + 32 * i] = reaches[i];
    }
    __syncwarp();
    if (lane_ == 0) copy_queries({number, first, head_, count});
    for (int32_t i = ahead; i < count; ++i) copy_step(i, blocks.block(i));
  }

  // By one thread.
  __device__ void copy_queries(const TileNumber& tile) {
    shared_.tile = tile;
    if (tile.blocks == 0) {
      barrier_arrive(&shared_.tile_full);
      return;
    }
    barrier_arrive_expect(&shared_.tile_full, Config::kQueryBytes);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) {
      copy_box(shared_.queries.panels[panel], &args_.queries, &shared_.tile_full, panel * kPanelColumns,
               (args_.first_head + tile.head) * args_.group, args_.first_token + tile.first);
    }
  }

  __device__ void copy_step(int32_t i, const TileBlock& block) {
    const int words = args_.more_words;
    uint32_t more_members = 0;
    if (lane_ < words) more_members = args_.more_members[(list_ + i) * words + lane_];
    stage_.wait_empty(shared_.keys_empty);
    Step& step = shared_.steps[stage_.slot];
    if (lane_ < words) step.members[lane_ + 1] = more_members;
    if (lane_ == 0) {
      step.base = block.base;
      step.info = block.info;
      step.members[0] = block.members;
    }
    __syncwarp();
    if (lane_ == 0) {
      copy_block<Config>(args_.keys, &shared_.keys_full[stage_.slot], shared_.keys[stage_.slot], args_.paged, kv_head_,
                         block);
    }
    stage_.wait_empty(shared_.values_empty);
    if (lane_ == 0) {
      copy_block<Config>(args_.values, &shared_.values_full[stage_.slot], shared_.values[stage_.slot], args_.paged,
                         kv_head_, block);
    }
    stage_.advance();
  }

  const Arguments& args_;
  Shared<Config>& shared_;
  const int lane_;
  int64_t list_ = 0;
  int32_t head_ = 0, kv_head_ = 0;
  uint32_t last_phase_ = 1;  // of the tile before; before the first, nothing is waited for
  RingPosition<Config::kStages> stage_;
};

}  // namespace openmsa::cuda::sm90::attend
