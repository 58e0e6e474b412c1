// Attend: a persistent thread block takes tiles (128 rows: tokens x the query heads of an index head) and works them
// off against the union of the blocks that their tokens selected. A row takes part in a block or not by its weights
// alone.
#pragma once

#include "cuda/common/instructions/register_limit.cuh"
#include "cuda/sm90/attend/copy.cuh"
#include "cuda/sm90/attend/rows.cuh"

namespace openmsa::cuda::sm90::attend {

template <typename Config>
__device__ inline void init_barriers(Shared<Config>& shared) {
  barrier_init(&shared.tile_full, 1);
  barrier_init(&shared.tile_empty, kConsumerWarps);
  for (int stage = 0; stage < Config::kStages; ++stage) {
    barrier_init(&shared.keys_full[stage], 1);
    barrier_init(&shared.keys_empty[stage], kConsumerWarps);
    barrier_init(&shared.values_full[stage], 1);
    barrier_init(&shared.values_empty[stage], kConsumerWarps);
  }
  fence_barrier_init();
}

template <typename Config>
__global__ void __launch_bounds__(kThreads, 1) attend_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ unsigned char shared_bytes[];
  Shared<Config>& shared =
      *reinterpret_cast<Shared<Config>*>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (group == kGroups) {
    lower_register_limit<kCopyRegisters>();
    if (threadIdx.x < kGroups * 128 + 32) TileCopies<Config>(args, shared).copy_tiles();
  } else {
    raise_register_limit<kConsumerRegisters>();
    Rows<Config>(args, shared, group).attend_tiles();
  }
}

}  // namespace openmsa::cuda::sm90::attend
