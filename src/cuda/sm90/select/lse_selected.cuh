// index_lse over selected blocks, block by block: the rows that chose a block meet it as one matrix product, each
// leaves the log of its sum over the block in a slot of its own, and a second kernel merges a row's slots in order. So
// a row's bits depend on its query, its keys and its selection alone.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/fence_proxy.cuh"
#include "cuda/sm90/plan/item.cuh"
#include "cuda/sm90/select/lse_rows.cuh"

namespace openmsa::cuda::sm90::lse {

__device__ inline uint32_t slot_of(const PartialArguments& args, const PlanItem& item) {
  return (item.token * args.heads + item.head) * args.topk + item.slot;
}

// The items from `begin` on, as many as one product takes, and what each thread needs of them. Everything is loaded at
// once, before it is known how many of them share the first one's place.
template <typename Element, int kHeadDim>
struct PartialTile {
  static constexpr int kStaged = kStagedRows<Element, kPartialThreads, kHeadDim, kPartialRows>;
  uint32_t begin;
  uint32_t place;            // of the first item; no_place past the end
  uint32_t lane_places[2];   // of items `lane` and `lane` + 32
  uint32_t staged[kStaged];  // whose queries the thread stages
  uint32_t summed[2];        // whose rows the thread holds sums of

  __device__ void load(const PartialArguments& args, uint32_t first, uint32_t end) {
    const auto clamped = [&](int row) { return min(first + row, end - 1); };
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    begin = first;
    place = first < end ? args.places[first] : args.no_place;
    static_assert(kPartialRows == 64);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = first + lane + 32 * half;
      lane_places[half] = at < end ? args.places[at] : args.no_place;
      summed[half] = args.items[clamped(thread / 32 * 16 + lane / 4 + 8 * half)];
    }
#pragma unroll
    for (int i = 0; i < kStaged; ++i) {
      staged[i] = args.items[clamped(staged_row<Element, kPartialThreads, kHeadDim>(thread, i))];
    }
  }

  // Items that share the first one's place. Each warp finds out for itself.
  __device__ int rows() const {
    const unsigned low = __ballot_sync(~0u, lane_places[0] != place);
    const unsigned high = __ballot_sync(~0u, lane_places[1] != place);
    return low != 0 ? __ffs(static_cast<int>(low)) - 1 : high != 0 ? 31 + __ffs(static_cast<int>(high)) : kPartialRows;
  }

  __device__ void stage_queries(const PartialArguments& args, StagedRows<kHeadDim, kPartialRows>* to, int rows) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int piece = staged_piece<Element, kHeadDim>(thread);
    const Element* const queries = static_cast<const Element*>(args.index_q) + piece * kVector<Element>;
#pragma unroll
    for (int i = 0; i < kStaged; ++i) {
      const int row = staged_row<Element, kPartialThreads, kHeadDim>(thread, i);
      const PlanItem item = unpack_item(staged[i]);
      const Element* const from = queries + item.token * args.q_stride_token + item.head * args.q_stride_head;
      stage_piece(to, row, piece, from, row < rows);
    }
  }
};

// Rows of the block that lie outside the tensor become zeros; those that no row sees may hold anything.
template <typename Element, int kHeadDim, int kBlock>
__device__ inline void stage_keys(const PartialArguments& args, StagedRows<kHeadDim, kBlock>* to, uint32_t place) {
  const int thread = static_cast<int>(threadIdx.x);
  const int piece = staged_piece<Element, kHeadDim>(thread);
  const int64_t first = place % args.places_per_head;
  const int64_t left = args.rows_end - first;
  const Element* const keys = static_cast<const Element*>(args.index_k) +
                              place / args.places_per_head * args.k_stride_head + first * args.k_stride_place +
                              piece * kVector<Element>;
#pragma unroll 4
  for (int i = 0; i < kStagedRows<Element, kPartialThreads, kHeadDim, kBlock>; ++i) {
    const int row = staged_row<Element, kPartialThreads, kHeadDim>(thread, i);
    stage_piece(to, row, piece, keys + (row < left ? row : 0) * args.k_stride_token, row < left);
  }
}

template <typename Element, int kHeadDim, int kBlock>
__global__ void __launch_bounds__(kPartialThreads, kPartialBlocksPerSm)
    partial_lse(const __grid_constant__ PartialArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<PartialShared<kHeadDim, kBlock>*>(shared_bytes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int thread_row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;  // and the row 8 below
  const uint32_t begin = blockIdx.x * args.per_block;
  const uint32_t end = min(begin + args.per_block, args.count);

  float sums[kBlock / 2] = {};
  PartialTile<Element, kHeadDim> tile;
  tile.load(args, begin, end);
  int rows = tile.rows();
  if (tile.place < args.no_place) tile.stage_queries(args, &shared.queries[0], rows);
  uint32_t staged_place = args.no_place;
  for (int stage = 0; tile.place < args.no_place; stage ^= 1) {
    if (tile.place != staged_place) {
      __syncthreads();  // every warp's product has read the block before
      stage_keys<Element>(args, &shared.keys, tile.place);
      staged_place = tile.place;
    }
    const PlanItem item[2] = {unpack_item(tile.summed[0]), unpack_item(tile.summed[1])};
    const int tile_rows = rows;
    tile.load(args, tile.begin + rows, end);
    copy_async_wait_all();
    fence_proxy_async();
    __syncthreads();
    wgmma_fence();
    issue_product<Element>(sums, shared.queries[stage], 0, shared.keys);
    // Under the product: the next tile, into the half that the product before has left.
    rows = tile.rows();
    if (tile.place < args.no_place) tile.stage_queries(args, &shared.queries[stage ^ 1], rows);
    wgmma_wait<0>();

    if (args.scale.in_double) scale_in_double(sums, args.scale.scale);
    const int limits[2] = {static_cast<int>(item[0].limit), static_cast<int>(item[1].limit)};
    if (__any_sync(~0u, min(limits[0], limits[1]) < kBlock)) {
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) {
        if (column_of(i, lane) >= limits[i / 2 % 2]) sums[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = row_max(sums, half);
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      const float offset = offset_of(max, args.scale.factor);
      float sum = row_sum(sums, half, args.scale.factor, offset);
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0 && thread_row + 8 * half < tile_rows) {
        args.partials[slot_of(args, item[half])] = offset + log2f(sum);
      }
    }
  }
  // The rest names no block.
  for (uint32_t i = tile.begin + threadIdx.x; i < end; i += kPartialThreads) {
    args.partials[slot_of(args, unpack_item(args.items[i]))] = -INFINITY;
  }
}

}  // namespace openmsa::cuda::sm90::lse
