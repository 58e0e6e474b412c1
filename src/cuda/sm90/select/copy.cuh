// The copying warp: takes units, tells the others, and brings queries and keys.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/bulk_tensor.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/select/sequences.cuh"
#include "cuda/sm90/select/shared.cuh"

namespace openmsa::cuda::sm90 {

// Coordinate of the box that holds elements [first, first + count).
__device__ inline int32_t box_start(const MapAxis& axis, int32_t first, int32_t count) {
  return axis.backwards ? axis.length - count - first : first;
}

template <typename Config>
__device__ inline void copy_queries(const SelectArguments& args, SelectShared<Config>& shared, const WorkUnit& unit) {
  const int32_t head = box_start(args.q_heads, unit.key_head * args.heads, args.heads);
  const int32_t token = box_start(args.q_tokens, unit.first_token, args.tile_tokens);
  barrier_arrive_expect(&shared.queries_full, args.heads * args.tile_tokens * Config::kRowBytes);
  for (int slab = 0; slab < Config::kSlabs; ++slab) {
    copy_box(shared.queries[slab], &args.queries, &shared.queries_full, slab * Config::kSlabElements, head, token);
  }
}

// One block of keys to its place in a stage. `page` is -1 for a block that is not there: it arrives as zeros.
template <typename Config>
__device__ inline void copy_block(const SelectArguments& args, SelectShared<Config>& shared, const WorkUnit& unit,
                                  int stage, int place, int32_t block, int32_t page) {
  const int32_t head = box_start(args.k_heads, unit.key_head, 1);
  for (int slab = 0; slab < Config::kSlabs; ++slab) {
    void* const to = shared.keys[stage][slab][place * Config::kBlock];
    const int32_t element = slab * Config::kSlabElements;
    if (args.layout.block_table != nullptr) {
      const int32_t at = page < 0 ? -1 : box_start(args.k_pages, page, 1);
      copy_box(to, &args.keys, &shared.keys_full[stage], element, head, 0, at);
    } else {
      const int32_t row = box_start(args.k_rows, unit.k_begin + block * Config::kBlock, Config::kBlock);
      copy_box(to, &args.keys, &shared.keys_full[stage], element, head, row);
    }
  }
}

template <typename Config>
__device__ inline void copy_units(const SelectArguments& args, SelectShared<Config>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    prefetch_tensor_map(&args.queries);
    prefetch_tensor_map(&args.keys);
  }
  const int32_t units = args.header->units;
  RingPosition<kUnitRing> unit_ring;
  RingPosition<Config::kStages> stage;
  uint32_t queries_phase = 0;
  for (int32_t number = static_cast<int32_t>(blockIdx.x);;) {
    WorkUnit unit{};
    unit.sequence = kNoMoreWork;
    if (number < units) unit = args.units[number];
    unit_ring.wait_empty(shared.units_empty);
    if (lane == 0) {
      shared.units[unit_ring.slot] = unit;
      barrier_arrive(&shared.units_full[unit_ring.slot]);
    }
    unit_ring.advance();
    if (unit.sequence == kNoMoreWork) return;
    int32_t next = 0;
    if (lane == 0) next = atomicAdd(&args.header->next, 1);

    if (unit.block_begin < unit.block_end) {
      barrier_wait(&shared.queries_empty, queries_phase ^ 1);
      queries_phase ^= 1;
      if (lane == 0) copy_queries(args, shared, unit);
    }
    const Pages pages(args.layout, unit.sequence);
    int32_t table_pages = 0;  // of 32 blocks, one per lane
    for (int32_t first = unit.block_begin; first < unit.block_end; first += Config::kStepBlocks) {
      const int32_t in_window = (first - unit.block_begin) % 32;
      if (pages.table != nullptr && in_window == 0) {
        const int32_t block = first + lane;
        table_pages = block < unit.block_end && pages.has_block(block) ? pages.table[block] : -1;
      }
      stage.wait_empty(shared.keys_empty);
      if (lane == 0) barrier_arrive_expect(&shared.keys_full[stage.slot], kStepKeys * Config::kRowBytes);
      for (int place = 0; place < Config::kStepBlocks; ++place) {
        const int32_t page = __shfl_sync(0xffffffffu, table_pages, in_window + place);
        if (lane == 0) copy_block(args, shared, unit, stage.slot, place, first + place, page);
      }
      stage.advance();
    }
    number = __shfl_sync(0xffffffffu, next, 0);
  }
}

}  // namespace openmsa::cuda::sm90
