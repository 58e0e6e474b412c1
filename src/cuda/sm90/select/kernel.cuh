// Select: a persistent thread block takes work units (a tile of query rows against a range of key blocks), dearest
// first.
//
//   one warp         copies: queries once a unit, keys block after block, by the bulk copy engine
//   product warps    scores of 256 (or 128) rows with 128 keys by warpgroup products, then each row's maximum per block
//   the other warps  keep the rows' running lists and write them
//
// A score's sum runs over the dimensions in the order of the product instruction, whatever the tile, batch, split or
// layout: its bits depend on its query and its key alone. docs/kernels/select.md has the schedule.
#pragma once

#include "cuda/common/instructions/mbarrier.cuh"
#include "cuda/common/instructions/register_limit.cuh"
#include "cuda/sm90/select/copy.cuh"
#include "cuda/sm90/select/keep.cuh"
#include "cuda/sm90/select/product.cuh"
#include "cuda/sm90/select/shared.cuh"

namespace openmsa::cuda::sm90 {

template <typename Config>
__device__ inline void init_barriers(SelectShared<Config>& shared) {
  constexpr int kProductWarps = 4 * Config::kGroups;
  barrier_init(&shared.queries_full, 1);
  barrier_init(&shared.queries_empty, kProductWarps);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    barrier_init(&shared.keys_full[stage], 1);
    barrier_init(&shared.keys_empty[stage], Config::kGroups);
  }
  for (int slot = 0; slot < kRing; ++slot) {
    barrier_init(&shared.maxima_full[slot], kProductWarps);
    barrier_init(&shared.maxima_empty[slot], Config::kKeeperWarps);
  }
  for (int slot = 0; slot < kUnitRing; ++slot) {
    barrier_init(&shared.units_full[slot], 1);
    barrier_init(&shared.units_empty[slot], kProductWarps + Config::kKeeperWarps);
  }
  fence_barrier_init();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) select_kernel(const __grid_constant__ SelectArguments args) {
  extern __shared__ unsigned char shared_bytes[];
  SelectShared<Config>& shared =
      *reinterpret_cast<SelectShared<Config>*>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < 4 * Config::kGroups) {
    if constexpr (Config::kMovesRegisters) raise_register_limit<Config::kProductRegisters>();
    multiply(args, shared);
  } else {
    if constexpr (Config::kMovesRegisters) lower_register_limit<Config::kOtherRegisters>();
    if (warp == 4 * Config::kGroups) {
      copy_units(args, shared);
    } else {
      keep_lists(args, shared);
    }
  }
}

}  // namespace openmsa::cuda::sm90
