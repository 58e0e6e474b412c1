// index_lse over whole prefixes: a tile of query rows stays in shared memory, its keys pass through a ring, and each
// thread keeps a maximum and a sum for its columns of its rows; the four threads of a row merge at the end.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/instructions/fence_proxy.cuh"
#include "cuda/common/instructions/mbarrier.cuh"
#include "cuda/common/instructions/named_barrier.cuh"
#include "cuda/common/instructions/register_limit.cuh"
#include "cuda/common/sequences.cuh"
#include "cuda/sm90/plan/config.h"
#include "cuda/sm90/select/lse_rows.cuh"

namespace openmsa::cuda::sm90::lse {

// A tile's rows and its queries. Rows number (query, index head of the key head).
struct PrefixTile {
  int32_t key_head;
  int64_t first_row, rows;
  int64_t first_query, end_query;
};

__device__ inline PrefixTile prefix_tile(const PrefixArguments& args, int64_t number) {
  PrefixTile tile;
  tile.key_head = static_cast<int32_t>(number % args.key_heads);
  // The last rows see most: longest first.
  tile.first_row = (args.tiles - 1 - number / args.key_heads) * kPrefixRows;
  tile.rows = min(static_cast<int64_t>(kPrefixRows), args.layout.tokens_q * args.heads_per_key_head - tile.first_row);
  tile.first_query = tile.first_row / args.heads_per_key_head;
  tile.end_query = (tile.first_row + tile.rows - 1) / args.heads_per_key_head + 1;
  return tile;
}

// Neighbouring queries [begin, end) of one sequence, and how many key tiles they need; the first `full_tiles` of them
// need no mask.
struct PrefixPass {
  int64_t begin, end;
  Sequence sequence;
  int64_t keys;  // of the last query
  int32_t tiles, full_tiles;
};

// The pass that begins at query `begin`. Each warp finds out for itself.
__device__ inline PrefixPass prefix_pass(const PrefixArguments& args, const PrefixTile& tile, int64_t begin, int lane) {
  PrefixPass pass{begin, tile.end_query, {}, 0, 0, 0};
  int64_t number = 0;
  if (args.owners != nullptr) {
    const uint32_t owner = args.owners[begin];
    number = owner;
    for (int64_t first = begin; first < tile.end_query; first += 32) {
      const int64_t query = first + lane;
      const unsigned other = __ballot_sync(~0u, query >= tile.end_query || args.owners[query] != owner);
      if (other == 0) continue;
      pass.end = first + __ffs(static_cast<int>(other)) - 1;
      break;
    }
  }
  if (number >= args.layout.batch) return pass;  // rows of no sequence see no key
  pass.sequence = read_sequence(args.layout, 1, number);
  pass.keys = pass.sequence.visible(pass.end - 1);
  pass.tiles = static_cast<int32_t>((pass.keys + kPrefixKeys - 1) / kPrefixKeys);
  const bool whole_tile = begin == tile.first_query && pass.end == tile.end_query && tile.rows == kPrefixRows;
  pass.full_tiles = whole_tile ? static_cast<int32_t>(pass.sequence.visible(begin) / kPrefixKeys) : 0;
  return pass;
}

template <typename Element, int kHeadDim>
__device__ inline void produce_keys(const PrefixArguments& args, const PrefixTile& tile, PrefixShared<kHeadDim>* shared,
                                    int thread) {
  const int piece = staged_piece<Element, kHeadDim>(thread);
  int64_t issued = 0;
  for (int64_t begin = tile.first_query; begin < tile.end_query;) {
    const PrefixPass pass = prefix_pass(args, tile, begin, thread % 32);
    const Element* const keys = static_cast<const Element*>(args.index_k) + tile.key_head * args.k_stride_head +
                                pass.sequence.k_begin * args.k_stride_token + piece * kVector<Element>;
    for (int64_t first = 0; first < pass.keys; first += kPrefixKeys, ++issued) {
      const int stage = static_cast<int>(issued % kPrefixStages);
      if (issued >= kPrefixStages) {
        barrier_wait(&shared->empty[stage], static_cast<uint32_t>(issued / kPrefixStages - 1) & 1);
      }
      const int64_t left = pass.keys - first;
#pragma unroll 4
      for (int i = 0; i < kStagedRows<Element, 128, kHeadDim, kPrefixKeys>; ++i) {
        const int row = staged_row<Element, 128, kHeadDim>(thread, i);
        const Element* const from = keys + (row < left ? first + row : 0) * args.k_stride_token;
        stage_piece(&shared->keys[stage], row, piece, from, row < left);
      }
      arrive_when_staged(&shared->full[stage]);
    }
    begin = pass.end;
  }
  copy_async_wait_all();
}

// Named barriers, one for each consumer warpgroup.
enum PrefixBarrier : int { kQueriesStaged = 1, kTurn = kQueriesStaged + kPrefixConsumers };

// The consumers take turns at issuing their products: else both would multiply at once and then both take exponentials,
// and neither unit would work while the other does.
__device__ inline void wait_for_turn(int warpgroup) { named_barrier_sync(kTurn + warpgroup, kPrefixConsumers * 128); }
__device__ inline void pass_turn(int warpgroup) {
  named_barrier_arrive(kTurn + (warpgroup + 1) % kPrefixConsumers, kPrefixConsumers * 128);
}

// What a thread keeps of each of its four rows: two of each product.
struct PrefixRow {
  float max = -INFINITY, sum = 0.0f;
};

template <int kSums>
__device__ inline void add_scores(float (&sums)[kSums], const LseScale& scale, PrefixRow (&rows)[2]) {
  if (scale.in_double) scale_in_double(sums, scale.scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    PrefixRow& row = rows[half];
    const float max = fmaxf(row.max, row_max(sums, half));
    row.sum = rebase(row.sum, row.max, max, scale.factor) + row_sum(sums, half, max, scale.factor);
    row.max = max;
  }
}

template <typename Element, int kHeadDim>
__device__ inline void consume_keys(const PrefixArguments& args, const PrefixTile& tile, PrefixShared<kHeadDim>* shared,
                                    int warpgroup, int thread) {
  const int lane = thread % 32;
  const int first_row = warpgroup * 128;
  const int thread_row = first_row + thread / 32 * 16 + lane / 4;  // + 64 part + 8 half
  const auto query_of = [&](int64_t row) { return (tile.first_row + row) / args.heads_per_key_head; };
  const auto head_of = [&](int64_t row) {
    return tile.key_head * args.heads_per_key_head +
           static_cast<int32_t>((tile.first_row + row) % args.heads_per_key_head);
  };

  const int piece = staged_piece<Element, kHeadDim>(thread);
#pragma unroll 1
  for (int i = 0; i < kStagedRows<Element, 128, kHeadDim, 128>; ++i) {
    const int row = first_row + staged_row<Element, 128, kHeadDim>(thread, i);
    const int64_t from = row < tile.rows ? row : 0;
    const Element* const source = static_cast<const Element*>(args.index_q) + query_of(from) * args.q_stride_token +
                                  head_of(from) * args.q_stride_head;
    stage_piece(&shared->queries, row, piece, source + piece * kVector<Element>, row < tile.rows);
  }
  copy_async_wait_all();
  fence_proxy_async();
  named_barrier_sync(kQueriesStaged + warpgroup, 128);

  constexpr int kLast = kPrefixConsumers - 1;
  static_assert(kPrefixConsumers == 2);
  if (warpgroup == kLast) pass_turn(kLast);  // the first one begins

  PrefixRow rows[2][2];
  float sums[2][kPrefixKeys / 2] = {};
  int64_t number = 0;
  for (int64_t begin = tile.first_query; begin < tile.end_query;) {
    const PrefixPass pass = prefix_pass(args, tile, begin, lane);
    int64_t visible[2][2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = thread_row + 64 * part + 8 * half;
        const int64_t query = query_of(row);
        const bool mine = row < tile.rows && query >= pass.begin && query < pass.end;
        visible[part][half] = mine && pass.tiles > 0 ? pass.sequence.visible(query) : 0;
      }
    }
    const auto pass_tile = [&](int32_t key_tile, auto masked) {
      const int stage = static_cast<int>(number % kPrefixStages);
      barrier_wait(&shared->full[stage], static_cast<uint32_t>(number / kPrefixStages) & 1);
      fence_proxy_async();
      wait_for_turn(warpgroup);
      wgmma_fence();
      issue_product<typename ProductType<Element>::Type>(sums[0], shared->queries, first_row, shared->keys[stage]);
      issue_product<typename ProductType<Element>::Type>(sums[1], shared->queries, first_row + 64, shared->keys[stage]);
      const auto add = [&](int part) {
        if constexpr (masked.value) {
          const int64_t first_key = static_cast<int64_t>(key_tile) * kPrefixKeys;
          const int left[2] = {static_cast<int>(min(visible[part][0] - first_key, int64_t{kPrefixKeys})),
                               static_cast<int>(min(visible[part][1] - first_key, int64_t{kPrefixKeys}))};
#pragma unroll
          for (int i = 0; i < kPrefixKeys / 2; ++i) {
            if (column_of(i, lane) >= left[i / 2 % 2]) sums[part][i] = -INFINITY;
          }
        }
        add_scores(sums[part], args.scale, rows[part]);
      };
      wgmma_wait<1>();
      add(0);
      wgmma_wait<0>();
      pass_turn(warpgroup);
      if (lane == 0) barrier_arrive(&shared->empty[stage]);
      add(1);
      ++number;
    };
    for (int32_t i = 0; i < pass.full_tiles; ++i) pass_tile(i, std::false_type{});
    for (int32_t i = pass.full_tiles; i < pass.tiles; ++i) pass_tile(i, std::true_type{});
    begin = pass.end;
  }
  if (warpgroup == 0) wait_for_turn(0);  // the last turn passed

#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      PrefixRow row = rows[part][half];
      float max = fmaxf(row.max, __shfl_xor_sync(~0u, row.max, 1));
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      float sum = rebase(row.sum, row.max, max, args.scale.factor);
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int at = thread_row + 64 * part + 8 * half;
      if (lane % 4 != 0 || at >= tile.rows) continue;
      args.index_lse[head_of(at) * args.lse_stride_head + query_of(at) * args.lse_stride_token] =
          natural_log(offset_of(max, args.scale.factor), sum);
    }
  }
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPrefixThreads, 1) prefix_lse(const __grid_constant__ PrefixArguments args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<PrefixShared<kHeadDim>*>(shared_bytes);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const PrefixTile tile = prefix_tile(args, blockIdx.x);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kPrefixStages; ++stage) {
      barrier_init(&shared.full[stage], kStagedArrivals * 128);
      barrier_init(&shared.empty[stage], kPrefixConsumers * 4);  // one arrival by each consumer warp
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warpgroup == kPrefixConsumers) {
    lower_register_limit<kPrefixProducerRegisters>();
    produce_keys<Element>(args, tile, &shared, thread);
  } else {
    raise_register_limit<kPrefixConsumerRegisters>();
    consume_keys<Element>(args, tile, &shared, warpgroup, thread);
  }
}

}  // namespace openmsa::cuda::sm90::lse
