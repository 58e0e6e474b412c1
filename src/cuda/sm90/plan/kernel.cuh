// Plan: the owner of each query row, and the items of a chunk before they are sorted.
#pragma once

#include <cstdint>

#include "cuda/common/sequences.cuh"
#include "cuda/sm90/plan/config.h"
#include "cuda/sm90/plan/index_view.cuh"
#include "cuda/sm90/plan/item.cuh"

namespace openmsa::cuda::sm90 {

// A row that offsets out of order give to several sequences belongs to the first. Rows are the y axis, so that a long
// sequence is shared out.
__global__ void __launch_bounds__(kPlanThreads) find_owners(const __grid_constant__ OwnerArguments args) {
  for (int64_t number = blockIdx.x; number < args.layout.batch; number += gridDim.x) {
    const Sequence sequence = read_sequence(args.layout, args.block_size, number);
    const int64_t begin = max(sequence.q_begin, args.first);
    const int64_t end = min(sequence.q_end, args.end);
    const auto owner = static_cast<uint32_t>(number);
    for (int64_t row = begin + blockIdx.y * kPlanThreads + threadIdx.x; row < end; row += gridDim.y * kPlanThreads) {
      uint32_t* const at = args.owners + (row - args.first);
      if (*at > owner) atomicMin(at, owner);
    }
  }
}

// The place of `block` for a query of `sequence`, and in *limit the keys of it that the query sees.
__device__ inline uint32_t find_place(const ListArguments& args, int64_t number, int64_t row, uint32_t key_head,
                                      int64_t block, uint32_t* limit) {
  const Sequence sequence = read_sequence(args.layout, args.block_size, number);
  const int64_t visible = row >= sequence.q_begin && row < sequence.q_end ? sequence.visible(row) : 0;
  if (block < 0 || block >= (visible + args.block_size - 1) / args.block_size) return args.no_place;
  const int64_t first_key = block * args.block_size;
  *limit = static_cast<uint32_t>(min(args.block_size, visible - first_key));
  int64_t place = sequence.k_begin + first_key;
  if (args.layout.paged) {
    place = args.layout.block_table[number * args.layout.block_table_stride + block];
    if (place < 0 || place >= args.layout.pages) return args.no_place;
  }
  return key_head * args.places_per_head + static_cast<uint32_t>(place);
}

__global__ void __launch_bounds__(kPlanThreads) list_items(const __grid_constant__ ListArguments args) {
  for (uint32_t i = blockIdx.x * kPlanThreads + threadIdx.x; i < args.count; i += gridDim.x * kPlanThreads) {
    const uint32_t slot = i % args.topk, row = i / args.topk;
    const uint32_t head = row % args.heads, token = row / args.heads;
    const int64_t query = args.first_token + token;
    const int64_t block = read_index(args.indices, head, query, slot);
    bool counts = block >= 0;
    for (uint32_t earlier = 0; counts && earlier < slot; ++earlier) {
      counts = read_index(args.indices, head, query, earlier) != block;
    }
    const uint32_t owner = args.owners != nullptr ? args.owners[token] : 0;
    uint32_t limit = 1;
    uint32_t place = args.no_place;
    if (counts && owner < args.layout.batch) {
      place = find_place(args, owner, query, head / args.heads_per_key_head, block, &limit);
    }
    args.places[i] = place;
    args.items[i] = pack_item({slot, head, token, limit});
  }
}

}  // namespace openmsa::cuda::sm90
