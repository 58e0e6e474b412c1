// The head mean of each visible block's share of a query's dense attention, from the log-sum-exps of whole prefixes.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/fence_proxy.cuh"
#include "cuda/common/sequences.cuh"
#include "cuda/sm90/captured_mass/config.h"
#include "cuda/sm90/select/lse_rows.cuh"

namespace openmsa::cuda::sm90::captured_mass {

__device__ inline TokenKeys keys_of(const SequenceLayout& layout, int64_t block_size, const uint32_t* owners,
                                    int64_t query) {
  TokenKeys keys{kNoOwner, 0, 0};
  const uint32_t owner = owners != nullptr ? owners[query] : 0;
  if (owner >= layout.batch) return keys;
  const Sequence sequence = read_sequence(layout, block_size, owner);
  keys.sequence = owner;
  keys.k_begin = sequence.k_begin;
  keys.visible = sequence.visible(query);
  return keys;
}

template <typename Element, int kHeadDim, int kBlock>
class MassTile {
 public:
  __device__ MassTile(const MassArguments& args, Shared<kHeadDim, kBlock>* shared)
      : args_(args),
        shared_(*shared),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        row_(thread_ / 32 * 16 + lane_ / 4),
        piece_(lse::staged_piece<Element, kHeadDim>(thread_)),
        first_(static_cast<int64_t>(blockIdx.x) * args.tile_tokens) {}

  __device__ void measure() {
    if (thread_ < args_.tile_tokens) {
      const int64_t token = first_ + thread_;
      shared_.tokens[thread_] = token < args_.tokens
                                    ? keys_of(args_.layout, args_.block_size, args_.owners, args_.first_token + token)
                                    : TokenKeys{kNoOwner, 0, 0};
    }
    stage_queries();
    __syncthreads();
    // Tokens of one sequence stand together, unless offsets are out of order: then its blocks are measured again.
    uint32_t before = kNoOwner;
    for (int number = 0; number < args_.tile_tokens; ++number) {
      const TokenKeys keys = shared_.tokens[number];
      if (keys.sequence != kNoOwner && keys.sequence != before) measure_sequence(keys);
      before = keys.sequence;
    }
    copy_async_wait_all();  // those of the queries, where there was nothing to measure
  }

 private:
  __device__ void stage_queries() {
    for (int i = 0; i < lse::kStagedRows<Element, kThreads, kHeadDim, kRows>; ++i) {
      const int row = lse::staged_row<Element, kThreads, kHeadDim>(thread_, i);
      const int64_t token = first_ + row / args_.group;
      const bool present = token < args_.tokens;
      const Element* const from = static_cast<const Element*>(args_.q) + (present ? token : 0) * args_.q_stride_token +
                                  row % args_.group * args_.q_stride_head + piece_ * kVector<Element>;
      lse::stage_piece(&shared_.queries, row, piece_, from, present);
    }
  }

  // Rows outside the tensor become zeros; those that no token sees may hold anything.
  __device__ void stage_keys(int64_t first_key, int buffer) {
    for (int i = 0; i < lse::kStagedRows<Element, kThreads, kHeadDim, kBlock>; ++i) {
      const int row = lse::staged_row<Element, kThreads, kHeadDim>(thread_, i);
      const bool present = first_key + row < args_.layout.tokens_k;
      const Element* const from = static_cast<const Element*>(args_.k) +
                                  (present ? first_key + row : 0) * args_.k_stride_token + piece_ * kVector<Element>;
      lse::stage_piece(&shared_.keys[buffer], row, piece_, from, present);
    }
  }

  __device__ void measure_sequence(const TokenKeys& of) {
    int64_t most = 0;
    for (int number = 0; number < args_.tile_tokens; ++number) {
      const TokenKeys& other = shared_.tokens[number];
      if (other.sequence == of.sequence) most = max(most, other.visible);
    }
    const int64_t begin = blockIdx.y * args_.share_blocks;
    const int64_t end = min(begin + args_.share_blocks, (most + kBlock - 1) / kBlock);
    if (begin >= end) return;
    stage_keys(of.k_begin + begin * kBlock, 0);
    int buffer = 0;
    for (int64_t block = begin; block < end; ++block, buffer ^= 1) {
      copy_async_wait_all();
      fence_proxy_async();
      __syncthreads();  // the block is there, and the other buffer's product is done
      if (block + 1 < end) stage_keys(of.k_begin + (block + 1) * kBlock, buffer ^ 1);
      float scores[kBlock / 2];
      wgmma_pin(scores);
      wgmma_fence();
      issue_product<Element>(scores, shared_.queries, 0, shared_.keys[buffer]);
      wgmma_wait<0>();
      wgmma_pin(scores);
      write_masses(scores, of.sequence, block);
    }
    __syncthreads();
  }

  __device__ void write_masses(const float (&scores)[kBlock / 2], uint32_t sequence, int64_t block) {
    float sums[2] = {};
    int32_t limits[2];
    float lses[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int number = (row_ + 8 * half) / args_.group;
      const TokenKeys& keys = shared_.tokens[number];
      const int64_t left = keys.sequence == sequence ? keys.visible - block * kBlock : 0;
      limits[half] = static_cast<int32_t>(min(left, static_cast<int64_t>(kBlock)));
      const int64_t head = args_.first_head + (row_ + 8 * half) % args_.group;
      constexpr float kLog2OfE = 1.442695040888963407f;
      lses[half] = limits[half] > 0
                       ? args_.lse[head * args_.layout.tokens_q + args_.first_token + first_ + number] * kLog2OfE
                       : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) {
      const int half = i / 2 % 2;
      const float share = exp2_approximate(fmaf(scores[i], args_.factor, -lses[half]));
      // A row without any mass has none to share out.
      if (column_of(i, lane_) < limits[half] && lses[half] != -INFINITY) sums[half] += share;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] += __shfl_xor_sync(~0u, sums[half], 1);
      sums[half] += __shfl_xor_sync(~0u, sums[half], 2);
#pragma unroll
      for (int rows = 1; rows < 8; rows *= 2) {
        const float other = __shfl_xor_sync(~0u, sums[half], 4 * rows);
        if (rows < args_.group) sums[half] += other;
      }
    }
    if (args_.group == 16) sums[0] += sums[1];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      if (lane_ % 4 != 0 || row % args_.group != 0 || limits[half] <= 0) continue;
      args_.masses[(first_ + row / args_.group) * args_.most_blocks + block] =
          sums[half] / static_cast<float>(args_.group);
    }
  }

  const MassArguments& args_;
  Shared<kHeadDim, kBlock>& shared_;
  const int thread_, lane_, row_, piece_;
  const int64_t first_;  // token of the chunk
};

template <typename Element, int kHeadDim, int kBlock>
__global__ void __launch_bounds__(kThreads) masses_kernel(const __grid_constant__ MassArguments args) {
  extern __shared__ unsigned char shared_bytes[];
  auto* const shared =
      reinterpret_cast<Shared<kHeadDim, kBlock>*>(shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024);
  MassTile<Element, kHeadDim, kBlock>(args, shared).measure();
}

}  // namespace openmsa::cuda::sm90::captured_mass
