// Join: a token's result over its tile's blocks and over the rest, by their log-sum-exps, in the order of the slots.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions/exp2.cuh"
#include "cuda/common/staged_rows.h"
#include "cuda/sm90/attend/config.h"

namespace openmsa::cuda::sm90::attend {

// A thread block joins some tokens at a time: one thread of each row weighs its parts, then all sum them up.
inline constexpr int kJoinWeights = 3072;  // 12 KB: 11 tokens of 17 parts and 16 rows, 2 of 65
inline constexpr int kJoinLoads = 8;       // in flight of each thread
static_assert(kJoinTokens * 16 <= kJoinThreads && 65 * 16 <= kJoinWeights);

struct JoinShared {
  float weights[kJoinWeights];  // [token, part, row]: of the tile and of the rest's parts, in the order of the slots
  uint32_t slots[kJoinTokens][64];  // of the rest's parts
  int32_t counts[kJoinTokens];
};

class Join {
 public:
  __device__ Join(const JoinArguments& args, JoinShared& shared)
      : args_(args),
        shared_(shared),
        group_shift_(args.group == 16 ? 4 : 3),
        part_rows_((args.topk + 1) << group_shift_),
        tokens_(min(kJoinTokens, kJoinWeights / part_rows_)) {}

  template <typename Element>
  __device__ void join() {
    const int64_t end = args_.tokens * args_.heads;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_; first < end;
         first += static_cast<int64_t>(gridDim.x) * tokens_) {
      const int count = static_cast<int>(min(end - first, static_cast<int64_t>(tokens_)));
      const int row = static_cast<int>(threadIdx.x);
      if (row < count << group_shift_) weigh(first, row >> group_shift_, row & (args_.group - 1));
      __syncthreads();
      const int pieces_shift = args_.head_dim == 128 ? 4 : 3;
      const int token_shift = group_shift_ + pieces_shift;
      for (int i = row; i < count << token_shift; i += kJoinThreads) {
        const int piece = i & ((1 << pieces_shift) - 1), number = i >> token_shift;
        sum_up<Element>(first, number, i >> pieces_shift & (args_.group - 1), piece);
      }
      __syncthreads();
    }
  }

 private:
  static constexpr float kLog2OfE = 1.442695040888963407f, kLogOfTwo = 0.693147180559945309f;

  // A row's weights, their sum divided out: of token `number` from `first` on.
  __device__ void weigh(int64_t first, int number, int row) {
    const int64_t of = first + number, token = of / args_.heads;
    const int64_t head = (of % args_.heads) * args_.group + row;
    const uint64_t slots = args_.rest_slots[of];
    if (row == 0) shared_.counts[number] = __popcll(slots);
    const float natural = args_.tile_lse[head * args_.tile_lse_stride_head + token * args_.tile_lse_stride_token];
    float* const lse =
        args_.lse == nullptr ? nullptr : args_.lse + head * args_.lse_stride_head + token * args_.lse_stride_token;
    if (slots == 0) {
      if (lse != nullptr) *lse = natural;
      return;
    }
    float* const weights = shared_.weights + number * part_rows_ + row;
    const float* const lses = args_.partial_lses + ((of * args_.topk) << group_shift_) + row;
    const float tile_lse = natural * kLog2OfE;
    weights[0] = tile_lse;
    float largest = tile_lse;
    int parts = 1;
    for (uint64_t left = slots; left != 0;) {
      float some[kJoinLoads];
      int these = 0;
#pragma unroll
      for (int i = 0; i < kJoinLoads; ++i) {
        some[i] = -INFINITY;
        if (left == 0) continue;
        const int slot = __ffsll(static_cast<long long>(left)) - 1;
        some[i] = __ldcs(lses + (slot << group_shift_));
        if (row == 0) shared_.slots[number][parts - 1 + i] = static_cast<uint32_t>(slot);
        left &= left - 1;
        ++these;
      }
#pragma unroll
      for (int i = 0; i < kJoinLoads; ++i) {
        if (i < these) weights[(parts + i) << group_shift_] = some[i];
        largest = fmaxf(largest, some[i]);
      }
      parts += these;
    }
    const float offset = fabsf(largest) < INFINITY ? largest : 0.0f;
    float sum = 0;
    for (int i = 0; i < parts; ++i) {
      const float weight = exp2_approximate(weights[i << group_shift_] - offset);
      weights[i << group_shift_] = weight;
      sum += weight;
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int i = 0; i < parts; ++i) weights[i << group_shift_] *= inverse;
    if (lse != nullptr) *lse = (offset + log2f(sum)) * kLogOfTwo;
  }

  // A part without weight has no say, whatever it holds.
  template <typename Element>
  __device__ static void add(float (&sums)[8], float weight, uint4 words) {
    if (weight == 0.0f) words = uint4{0, 0, 0, 0};
    float part[8];
    widen_vector(Element{}, words, part);
#pragma unroll
    for (int e = 0; e < 8; ++e) sums[e] = fmaf(weight, part[e], sums[e]);
  }

  // 8 elements of a row.
  template <typename Element>
  __device__ void sum_up(int64_t first, int number, int row, int piece) {
    static_assert(kVector<Element> == 8);
    constexpr int kPanelPieces = kPanelRowBytes / 16;
    const int count = shared_.counts[number];
    if (count == 0) return;
    const int64_t of = first + number, token = of / args_.heads;
    const int64_t head = (of % args_.heads) * args_.group + row;
    const float* const weights = shared_.weights + number * part_rows_ + row;
    uint4* const out = reinterpret_cast<uint4*>(static_cast<Element*>(args_.out) + token * args_.out_stride_token +
                                                head * args_.out_stride_head + piece * kVector<Element>);
    const uint32_t panel_bytes = static_cast<uint32_t>(args_.group) * kPanelRowBytes;
    const uint32_t slot_bytes = static_cast<uint32_t>(args_.head_dim / kPanelColumns) * panel_bytes;
    const char* const partials =
        static_cast<const char*>(args_.partials) + of * args_.topk * static_cast<int64_t>(slot_bytes) +
        piece / kPanelPieces * panel_bytes + row * kPanelRowBytes + (piece % kPanelPieces ^ row % 8) * 16;
    float sums[8] = {};
    const uint4 tile = *out;
    for (int from = 0; from < count; from += kJoinLoads) {
      uint4 words[kJoinLoads];
#pragma unroll
      for (int i = 0; i < kJoinLoads; ++i) {
        words[i] = uint4{0, 0, 0, 0};
        if (from + i < count) {
          words[i] = __ldcs(reinterpret_cast<const uint4*>(partials + shared_.slots[number][from + i] * slot_bytes));
        }
      }
      if (from == 0) add<Element>(sums, weights[0], tile);
#pragma unroll
      for (int i = 0; i < kJoinLoads; ++i) {
        const int part = from + i + 1;
        add<Element>(sums, part <= count ? weights[part << group_shift_] : 0.0f, words[i]);
      }
    }
    uint4 words;
    words.x = narrow_pair(Element{}, sums[0], sums[1]);
    words.y = narrow_pair(Element{}, sums[2], sums[3]);
    words.z = narrow_pair(Element{}, sums[4], sums[5]);
    words.w = narrow_pair(Element{}, sums[6], sums[7]);
    __stcs(out, words);
  }

  const JoinArguments& args_;
  JoinShared& shared_;
  const int group_shift_, part_rows_;  // rows of a token's parts
  const int tokens_;                   // at a time
};

template <typename Element>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(const __grid_constant__ JoinArguments args) {
  __shared__ JoinShared shared;
  Join(args, shared).join<Element>();
}

}  // namespace openmsa::cuda::sm90::attend
