// Repair: rows of marked tiles that are not finite, formed from the keys that they see alone, in float64 where a
// float's rounding would show. Almost every launch finds nothing to do.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions/exp2.cuh"
#include "cuda/sm90/attend/config.h"

namespace openmsa::cuda::sm90::attend {

struct RepairScratch {
  float weights[kMostRepairKeys];
  const void* values[kMostRepairKeys / 64];  // of each of the row's blocks
  int32_t keys[kMostRepairKeys / 64];
  int32_t blocks;
  float partial[kRepairThreads / 32];
};

template <typename Element>
__device__ inline float widened(Element value) {
  float pair[2];
  widen_word(Element{}, static_cast<uint32_t>(value.bits), pair);
  return pair[0];
}

__device__ inline float block_maximum(float mine, RepairScratch& scratch) {
  for (int step = 16; step > 0; step /= 2) mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch.partial[threadIdx.x / 32] = mine;
  __syncthreads();
  for (const float other : scratch.partial) mine = fmaxf(mine, other);
  return mine;
}

__device__ inline float block_sum(float mine, RepairScratch& scratch) {
  for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(~0u, mine, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch.partial[threadIdx.x / 32] = mine;
  __syncthreads();
  float sum = 0;
  for (const float part : scratch.partial) sum += part;
  return sum;
}

template <typename Element, typename CacheElement>
class Repair {
 public:
  __device__ Repair(const RepairArguments& args, RepairScratch& scratch, int64_t number)
      : args_(args),
        of_(args.attend),
        scratch_(scratch),
        number_(number),
        index_head_(of_.first_head + number / of_.tiles),
        first_(number % of_.tiles * of_.tile_tokens),
        kv_head_(index_head_ * of_.kv_heads / of_.index_heads) {}

  __device__ void repair_tile() {
    for (int32_t in_tile = 0; in_tile < of_.tile_tokens && first_ + in_tile < of_.tokens; ++in_tile) {
      for (int32_t head = 0; head < of_.group; ++head) {
        if (needs_repair(first_ + in_tile, index_head_ * of_.group + head)) {
          repair_row(in_tile, first_ + in_tile, index_head_ * of_.group + head);
        }
      }
    }
  }

 private:
  __device__ Element* out_row(int64_t token, int64_t head) const {
    return static_cast<Element*>(of_.out) + token * of_.out_stride_token + head * of_.out_stride_head;
  }

  __device__ bool needs_repair(int64_t token, int64_t head) {
    const int d = static_cast<int>(threadIdx.x);
    const bool is_finite = d >= args_.head_dim || fabsf(widened(out_row(token, head)[d])) < INFINITY;
    return block_sum(is_finite ? 0.0f : 1.0f, scratch_) != 0.0f;
  }

  __device__ bool is_member(int64_t block, int32_t in_tile) const {
    const uint32_t word =
        in_tile < 32 ? of_.blocks[block].members : of_.more_members[block * of_.more_words + in_tile / 32 - 1];
    return (word >> (in_tile % 32) & 1) != 0;
  }

  // Scores of the row's keys.
  __device__ void score_blocks(int32_t in_tile, int64_t token, int64_t head) {
    const int64_t list = number_ * of_.capacity;
    const Element* const query =
        static_cast<const Element*>(args_.q) + token * args_.q_stride_token + head * args_.q_stride_head;
    int32_t blocks = 0;
    for (int32_t i = 0; i < of_.all_counts[number_]; ++i) {
      if (!is_member(list + i, in_tile)) continue;
      const TileBlock block = of_.blocks[list + i];
      const int64_t page = of_.paged ? block.page : 0, row = of_.paged ? 0 : block.base;
      const int32_t keys = min(of_.reaches[token] - block.base, args_.block_size);
      const CacheElement* const k = static_cast<const CacheElement*>(args_.k) + page * args_.k_stride_page +
                                    row * args_.k_stride_token + kv_head_ * args_.k_stride_head;
      for (int32_t key = static_cast<int32_t>(threadIdx.x); key < keys; key += kRepairThreads) {
        float score = 0;
        for (int32_t d = 0; d < args_.head_dim; ++d) {
          score = fmaf(widened(query[d]), widened(k[key * args_.k_stride_token + d]), score);
        }
        scratch_.weights[blocks * args_.block_size + key] = score;
      }
      if (threadIdx.x == 0) {
        scratch_.values[blocks] = static_cast<const CacheElement*>(args_.v) + page * args_.v_stride_page +
                                  row * args_.v_stride_token + kv_head_ * args_.v_stride_head;
        scratch_.keys[blocks] = keys;
      }
      ++blocks;
    }
    if (threadIdx.x == 0) scratch_.blocks = blocks;
    __syncthreads();
  }

  template <typename Visit>
  __device__ void visit_weights(const Visit& visit) {
    for (int32_t block = 0; block < scratch_.blocks; ++block) {
      for (int32_t key = static_cast<int32_t>(threadIdx.x); key < scratch_.keys[block]; key += kRepairThreads) {
        visit(scratch_.weights[block * args_.block_size + key]);
      }
    }
  }

  __device__ void repair_row(int32_t in_tile, int64_t token, int64_t head) {
    score_blocks(in_tile, token, head);
    float largest = -INFINITY;
    visit_weights([&](float& weight) { largest = fmaxf(largest, weight * of_.factor); });
    largest = block_maximum(largest, scratch_);
    const float offset = fabsf(largest) < INFINITY ? largest : 0.0f;
    float sum = 0;
    visit_weights([&](float& weight) {
      weight = exp2_approximate(static_cast<float>(static_cast<double>(weight) * of_.factor - offset));
      sum += weight;
    });
    sum = block_sum(sum, scratch_);
    const int64_t d = threadIdx.x;
    float result = 0;
    for (int32_t block = 0; d < args_.head_dim && block < scratch_.blocks; ++block) {
      const auto* const values = static_cast<const CacheElement*>(scratch_.values[block]);
      for (int32_t key = 0; key < scratch_.keys[block]; ++key) {
        result = fmaf(scratch_.weights[block * args_.block_size + key], widened(values[key * args_.v_stride_token + d]),
                      result);
      }
    }
    if (d < args_.head_dim) {
      result = sum == 0.0f ? 0.0f : result / sum;
      out_row(token, head)[d].bits = static_cast<uint16_t>(narrow_pair(Element{}, result, 0.0f));
    }
    __syncthreads();  // the next row takes the scratch
  }

  const RepairArguments& args_;
  const Arguments& of_;
  RepairScratch& scratch_;
  const int64_t number_, index_head_, first_, kv_head_;
};

template <typename Element, typename CacheElement>
__global__ void __launch_bounds__(kRepairThreads) repair_kernel(const __grid_constant__ RepairArguments args) {
  __shared__ RepairScratch scratch;
  if (args.attend.header->has_suspect == 0) return;
  const int64_t tiles = static_cast<int64_t>(args.attend.tiles) * args.attend.heads;
  for (int64_t number = blockIdx.x; number < tiles; number += gridDim.x) {
    if (args.attend.suspects[number] != 0) Repair<Element, CacheElement>(args, scratch, number).repair_tile();
  }
}

}  // namespace openmsa::cuda::sm90::attend
