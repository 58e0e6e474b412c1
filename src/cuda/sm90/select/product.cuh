// The product warps: scores of the tile's rows with a step's keys, and each row's maximum per block.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/load_matrix.cuh"
#include "cuda/common/instructions/wgmma.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/sm90/select/lists.cuh"
#include "cuda/sm90/select/sequences.cuh"
#include "cuda/sm90/select/shared.cuh"

namespace openmsa::cuda::sm90 {

inline constexpr int kSums = kStepKeys / 2;  // of a product, per thread
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// A warpgroup's queries for one of its two products: descriptors of shared memory, or the registers themselves.
template <typename Config, bool kInRegisters = Config::kQueriesInRegisters>
struct Queries {
  uint64_t start;

  __device__ Queries(const SelectShared<Config>& shared, int first_row)
      : start(wgmma_descriptor<Config::kSlabBytes>(shared.queries[0][first_row])) {}

  __device__ uint64_t operand(int product) const {
    constexpr int kPerSlab = Config::kSlabBytes / Config::kProductBytes;
    return start +
           (product / kPerSlab * Config::kTileRows * Config::kSlabBytes + product % kPerSlab * Config::kProductBytes) /
               16;
  }
};

template <typename Config>
struct Queries<Config, true> {
  uint32_t words[Config::kProducts][4];

  __device__ Queries(const SelectShared<Config>& shared, int first_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kPieces = Config::kSlabBytes / 16;
    constexpr int kRowsPerSwizzle = 8 / kPieces;
    const int row = first_row + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int product = 0; product < Config::kProducts; ++product) {
      const int piece = 2 * product + lane / 16;
      const int at = (piece % kPieces) ^ (row / kRowsPerSwizzle % kPieces);
      load_matrices(words[product], &shared.queries[piece / kPieces][row][16 * at]);
    }
  }

  __device__ const uint32_t (&operand(int product) const)[4] { return words[product]; }
};

template <typename Config>
__device__ inline void issue_products(float (&sums)[kSums], const Queries<Config>& queries, uint64_t keys) {
  wgmma_pin(sums);
  wgmma_fence();
#pragma unroll
  for (int product = 0; product < Config::kProducts; ++product) {
    constexpr int kPerSlab = Config::kSlabBytes / Config::kProductBytes;
    const int offset = product / kPerSlab * kStepKeys * Config::kSlabBytes + product % kPerSlab * Config::kProductBytes;
    wgmma_product(typename Config::Element{}, sums, queries.operand(product), keys + offset / 16, product != 0);
  }
  wgmma_commit();
}

// Maxima of a thread's columns, for its two rows of a product and each block of the step.
template <typename Config>
using RowMaxima = uint32_t[Config::kStepBlocks][2];

// As integers, three to an instruction: right unless the result is negative or NaN. Returns whether it is right.
template <typename Config>
__device__ inline bool integer_maxima(const float (&sums)[kSums], RowMaxima<Config>& maxima) {
  constexpr int kPairs = kSums / 4 / Config::kStepBlocks;  // of a row, per block
  bool right = true;
#pragma unroll
  for (int block = 0; block < Config::kStepBlocks; ++block) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const auto bits = [&](int pair, int column) {
        return __float_as_int(sums[4 * (block * kPairs + pair) + 2 * row + column]);
      };
      int even = max(bits(0, 0), bits(0, 1)), odd = max(bits(1, 0), bits(1, 1));
#pragma unroll
      for (int pair = 2; pair < kPairs; pair += 2) {
        even = max(max(even, bits(pair, 0)), bits(pair, 1));
        odd = max(max(odd, bits(pair + 1, 0)), bits(pair + 1, 1));
      }
      const uint32_t best = static_cast<uint32_t>(max(even, odd));
      right &= best <= kInfinityBits;
      maxima[block][row] = best | 0x80000000u;
    }
  }
  return right;
}

// As floats: NaN is left out.
template <typename Config>
__device__ inline void float_maxima(const float (&sums)[kSums], RowMaxima<Config>& maxima) {
  constexpr int kPairs = kSums / 4 / Config::kStepBlocks;
#pragma unroll
  for (int block = 0; block < Config::kStepBlocks; ++block) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float best = -INFINITY;
#pragma unroll
      for (int i = 0; i < 2 * kPairs; ++i) {
        best = fmaxf(best, sums[4 * (block * kPairs + i / 2) + 2 * row + i % 2]);
      }
      maxima[block][row] = ordered_score(best);
    }
  }
}

// Keys that a row does not see become -inf. `first` is the step's first key, `row` the tile row of sums[0].
template <typename Config>
__device__ inline void hide_keys(const SelectArguments& args, float (&sums)[kSums], int32_t first_token,
                                 int32_t diagonal, int32_t first, int row) {
  const int32_t lane_column = static_cast<int32_t>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t place = (row + 8 * r) / args.heads;
    const int32_t token = first_token + (args.q_tokens.backwards ? args.tile_tokens - 1 - place : place);
    const int32_t left = visible_keys(token, diagonal) - first;
#pragma unroll
    for (int block = 0; block < Config::kStepBlocks; ++block) {
      // Columns [low, high) of the block are visible; those of this lane start at lane_column.
      const int32_t seen = min(max(left - block * Config::kBlock, 0), Config::kBlock);
      const int32_t low = (args.k_rows.backwards ? Config::kBlock - seen : 0) - lane_column;
      const int32_t high = (args.k_rows.backwards ? Config::kBlock : seen) - lane_column;
#pragma unroll
      for (int i = 0; i < Config::kBlock / 4; ++i) {
        const int column = i / 2 * 8 + i % 2;
        if (column < low || column >= high) sums[block * Config::kBlock / 2 + i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
      }
    }
  }
}

// Four values in each of four lanes: lane 2 half + row gets the maximum of value [half][row].
__device__ inline uint32_t spread_maximum(uint32_t v00, uint32_t v01, uint32_t v10, uint32_t v11) {
  const bool second_row = threadIdx.x % 2 != 0, second_half = threadIdx.x / 2 % 2 != 0;
  const uint32_t first = max(second_row ? v01 : v00, __shfl_xor_sync(0xffffffffu, second_row ? v00 : v01, 1));
  const uint32_t second = max(second_row ? v11 : v10, __shfl_xor_sync(0xffffffffu, second_row ? v10 : v11, 1));
  return max(second_half ? second : first, __shfl_xor_sync(0xffffffffu, second_half ? first : second, 2));
}

template <typename Config>
__device__ inline void multiply(const SelectArguments& args, SelectShared<Config>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int position = static_cast<int>(threadIdx.x);  // of this thread's maxima in a batch
  const uint64_t first_stage = wgmma_descriptor<Config::kSlabBytes>(shared.keys);
  constexpr int kStageBytes = kStepKeys * Config::kRowBytes;
  // Blocks of which some row sees a part only compete when no local block is forced.
  const bool own_block_competes = args.local_blocks == 0;

  RingPosition<kUnitRing> unit_ring;
  RingPosition<Config::kStages> stage;
  RingPosition<kRing> batch;
  uint32_t queries_phase = 0;
  for (;;) {
    unit_ring.wait_full(shared.units_full);
    const WorkUnit& unit = shared.units[unit_ring.slot];
    if (unit.sequence == kNoMoreWork) return;
    const int32_t block_end = unit.block_end;
    int32_t block = unit.block_begin;
    if (block < block_end) {
      barrier_wait(&shared.queries_full, queries_phase);
      queries_phase ^= 1;
      const Queries<Config> queries[2] = {{shared, group * kGroupRows}, {shared, group * kGroupRows + kProductRows}};
      if constexpr (Config::kQueriesInRegisters) {
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.queries_empty);
      }

      // From here on some row of the tile sees a part of the block.
      const int32_t whole_blocks =
          own_block_competes ? visible_keys(unit.first_token, unit.diagonal) / Config::kBlock : block_end;
      int in_batch = 0;
      for (; block < block_end; block += Config::kStepBlocks) {
        float sums[2][kSums];
        stage.wait_full(shared.keys_full);
        const uint64_t keys = first_stage + static_cast<uint64_t>(stage.slot * (kStageBytes / 16));
        issue_products<Config>(sums[0], queries[0], keys);
        issue_products<Config>(sums[1], queries[1], keys);
        RowMaxima<Config> maxima[2];
        wgmma_wait<1>();
        wgmma_pin(sums[0]);
        bool right = integer_maxima<Config>(sums[0], maxima[0]);
        wgmma_wait<0>();
        wgmma_pin(sums[1]);
        if (threadIdx.x % 128 == 0) barrier_arrive(&shared.keys_empty[stage.slot]);
        stage.advance();
        right &= integer_maxima<Config>(sums[1], maxima[1]);
        const bool whole = block + Config::kStepBlocks <= whole_blocks;
        if (__any_sync(0xffffffffu, !right || !whole)) {
          if (!whole) {
            const int32_t first = block * Config::kBlock;
            const int first_row = group * kGroupRows + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              hide_keys<Config>(args, sums[half], unit.first_token, unit.diagonal, first,
                                first_row + half * kProductRows);
            }
          }
          float_maxima<Config>(sums[0], maxima[0]);
          float_maxima<Config>(sums[1], maxima[1]);
        }

        if (in_batch == 0) batch.wait_empty(shared.maxima_empty);
#pragma unroll
        for (int place = 0; place < Config::kStepBlocks; ++place) {
          shared.maxima[batch.slot][in_batch + place][position] =
              spread_maximum(maxima[0][place][0], maxima[0][place][1], maxima[1][place][0], maxima[1][place][1]);
        }
        in_batch += Config::kStepBlocks;
        if (in_batch == kBatchBlocks || block + Config::kStepBlocks >= block_end) {
          in_batch = 0;
          __syncwarp();
          if (lane == 0) barrier_arrive(&shared.maxima_full[batch.slot]);
          batch.advance();
        }
      }
      if constexpr (!Config::kQueriesInRegisters) {
        if (lane == 0) barrier_arrive(&shared.queries_empty);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.units_empty[unit_ring.slot]);
    unit_ring.advance();
  }
}

}  // namespace openmsa::cuda::sm90
