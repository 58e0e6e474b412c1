// The masses of a query's valid distinct blocks, and the largest as many.
#pragma once

#include <cstdint>

#include "cuda/sm90/captured_mass/masses.cuh"
#include "cuda/sm90/plan/index_view.cuh"

namespace openmsa::cuda::sm90::captured_mass {

// Masses in descending order, equal ones by lower block.
struct Candidate {
  float mass;
  int32_t block;

  __device__ bool precedes(const Candidate& other) const {
    return mass > other.mass || (mass == other.mass && block < other.block);
  }
};
inline constexpr int32_t kNoBlock = 0x7fffffff;

struct SumScratch {
  Candidate best[kThreads / 32];
  float share;
  int32_t count;
};

// The first candidate of all threads.
__device__ inline Candidate first_of(Candidate mine, SumScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int step = 16; step > 0; step /= 2) {
    const Candidate other = {__shfl_xor_sync(~0u, mine.mass, step), __shfl_xor_sync(~0u, mine.block, step)};
    if (other.precedes(mine)) mine = other;
  }
  __syncthreads();  // the round before is read
  if (thread % 32 == 0) scratch.best[thread / 32] = mine;
  __syncthreads();
  mine = scratch.best[0];
  for (const Candidate& other : scratch.best) {
    if (other.precedes(mine)) mine = other;
  }
  return mine;
}

// By one thread: rows have at most 64 entries.
__device__ inline void sum_selected(const SumArguments& args, int64_t query, int64_t blocks, const float* masses,
                                    SumScratch& scratch) {
  scratch.share = 0;
  scratch.count = 0;
  for (int32_t slot = 0; slot < args.topk; ++slot) {
    const int64_t block = read_index(args.indices, args.head, query, slot);
    bool counts = block >= 0 && block < blocks;
    for (int32_t earlier = 0; counts && earlier < slot; ++earlier) {
      counts = read_index(args.indices, args.head, query, earlier) != block;
    }
    if (!counts) continue;
    scratch.share += masses[block];
    ++scratch.count;
  }
}

__global__ void __launch_bounds__(kThreads) sums_kernel(const __grid_constant__ SumArguments args) {
  __shared__ SumScratch scratch;
  for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
    const int64_t query = args.first_token + token;
    const TokenKeys keys = keys_of(args.layout, args.block_size, args.owners, query);
    const int64_t blocks = (keys.visible + args.block_size - 1) / args.block_size;
    const float* const masses = args.masses + token * args.most_blocks;
    __syncthreads();  // the token before is done
    if (threadIdx.x == 0) sum_selected(args, query, blocks, masses, scratch);
    bool is_nan = false;
    for (int64_t block = threadIdx.x; block < blocks; block += kThreads) is_nan |= masses[block] != masses[block];
    is_nan = __syncthreads_or(is_nan);
    float best = is_nan ? NAN : 0.0f;
    Candidate last = {INFINITY, -1};
    for (int32_t taken = 0; taken < scratch.count && !is_nan; ++taken) {
      Candidate mine = {-INFINITY, kNoBlock};
      for (int64_t block = threadIdx.x; block < blocks; block += kThreads) {
        const Candidate candidate = {masses[block], static_cast<int32_t>(block)};
        if (last.precedes(candidate) && candidate.precedes(mine)) mine = candidate;
      }
      last = first_of(mine, scratch);
      best += last.mass;
    }
    if (threadIdx.x == 0) {
      args.share[args.head * args.share_stride_head + query * args.share_stride_token] = scratch.share;
      args.best[args.head * args.best_stride_head + query * args.best_stride_token] = best;
    }
  }
}

}  // namespace openmsa::cuda::sm90::captured_mass
