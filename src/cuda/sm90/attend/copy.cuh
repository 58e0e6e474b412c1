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
__device__ inline void copy_tiles(const Arguments& args, Shared<Config>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    prefetch_tensor_map(&args.queries);
    prefetch_tensor_map(&args.keys);
    prefetch_tensor_map(&args.values);
  }
  const int32_t tiles = args.tiles * args.heads;
  const int words = args.more_words;
  RingPosition<Config::kStages> stage;
  uint32_t tile_phase = 0;
  for (int32_t number = static_cast<int32_t>(blockIdx.x);;) {
    const bool more = number < tiles;
    const int32_t count = more ? args.counts[number] : kNoMoreTiles;
    const int32_t head = number / args.tiles, first = number % args.tiles * args.tile_tokens;
    barrier_wait(&shared.tile_empty, tile_phase ^ 1);
    tile_phase ^= 1;
    if (lane == 0) {
      shared.tile = {number, first, head, count};
      if (count > 0) {
        barrier_arrive_expect(&shared.tile_full, Config::kQueryBytes);
        for (int panel = 0; panel < Config::kPanels; ++panel) {
          copy_box(shared.queries.panels[panel], &args.queries, &shared.tile_full, panel * kPanelColumns,
                   (args.first_head + head) * args.group, args.first_token + first);
        }
      } else {
        barrier_arrive(&shared.tile_full);
      }
    }
    if (!more) return;
    int32_t next = 0;
    if (lane == 0) next = atomicAdd(&args.header->next, 1);

    const int64_t list = static_cast<int64_t>(number) * args.capacity;
    const int32_t kv_head = (args.first_head + head) * args.kv_heads / args.index_heads;
    BlockList blocks(args.blocks + list, count, lane);
    for (int32_t i = 0; i < count; ++i) {
      const TileBlock block = blocks.block(i);
      uint32_t more_members = 0;
      if (lane < words) more_members = args.more_members[(list + i) * words + lane];
      stage.wait_empty(shared.keys_empty);
      Step& step = shared.steps[stage.slot];
      if (lane < words) step.members[lane + 1] = more_members;
      if (lane == 0) {
        step.base = block.base;
        step.info = block.info;
        step.members[0] = block.members;
      }
      __syncwarp();
      if (lane == 0) {
        copy_block<Config>(args.keys, &shared.keys_full[stage.slot], shared.keys[stage.slot], args.paged, kv_head,
                           block);
      }
      stage.wait_empty(shared.values_empty);
      if (lane == 0) {
        copy_block<Config>(args.values, &shared.values_full[stage.slot], shared.values[stage.slot], args.paged, kv_head,
                           block);
      }
      stage.advance();
    }
    number = __shfl_sync(~0u, next, 0);
  }
}

}  // namespace openmsa::cuda::sm90::attend
