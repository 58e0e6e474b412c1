// Join: a token's result over its tile's blocks and over the rest, by their log-sum-exps, in the order of the slots.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions/exp2.cuh"
#include "cuda/common/staged_rows.h"
#include "cuda/sm90/attend/config.h"

namespace openmsa::cuda::sm90::attend {

template <typename Element>
__global__ void __launch_bounds__(kJoinThreads) join_kernel(const __grid_constant__ JoinArguments args) {
  constexpr int kPieceElements = kVector<Element>, kPanelPieces = kPanelRowBytes / 16;
  constexpr float kLog2OfE = 1.442695040888963407f, kLogOfTwo = 0.693147180559945309f;
  const int pieces = args.head_dim / kPieceElements;
  for (int64_t of = blockIdx.x; of < args.tokens * args.heads; of += gridDim.x) {
    const uint64_t slots = args.rest_slots[of];
    const int64_t token = of / args.heads, index_head = of % args.heads;
    if (slots == 0) {
      const int row = static_cast<int>(threadIdx.x);
      if (args.lse != nullptr && row < args.group) {
        const int64_t head = index_head * args.group + row;
        args.lse[head * args.lse_stride_head + token * args.lse_stride_token] =
            args.tile_lse[head * args.tile_lse_stride_head + token * args.tile_lse_stride_token];
      }
      continue;
    }
    for (int i = static_cast<int>(threadIdx.x); i < args.group * pieces; i += kJoinThreads) {
      const int row = i / pieces, piece = i % pieces;
      const int64_t head = index_head * args.group + row;
      const float* const lses = args.partial_lses + of * args.topk * args.group + row;
      const float tile_lse =
          args.tile_lse[head * args.tile_lse_stride_head + token * args.tile_lse_stride_token] * kLog2OfE;
      float largest = tile_lse;
      for (uint64_t left = slots; left != 0; left &= left - 1) {
        largest = fmaxf(largest, lses[(__ffsll(static_cast<long long>(left)) - 1) * args.group]);
      }
      const float offset = fabsf(largest) < INFINITY ? largest : 0.0f;
      Element* const out = static_cast<Element*>(args.out) + token * args.out_stride_token +
                           head * args.out_stride_head + piece * kPieceElements;
      float sum = 0, sums[kPieceElements] = {};
      // A part without weight has no say, whatever it holds.
      const auto add = [&](float lse, const void* from) {
        const float weight = exp2_approximate(lse - offset);
        sum += weight;
        if (weight == 0.0f) return;
        float part[kPieceElements];
        widen_vector(Element{}, *static_cast<const uint4*>(from), part);
#pragma unroll
        for (int e = 0; e < kPieceElements; ++e) sums[e] = fmaf(weight, part[e], sums[e]);
      };
      const int64_t row_bytes = kPanelRowBytes, panel_bytes = args.group * row_bytes;
      const int64_t slot_bytes = args.head_dim / kPanelColumns * panel_bytes;
      const char* const partials = static_cast<const char*>(args.partials) + of * args.topk * slot_bytes +
                                   piece / kPanelPieces * panel_bytes + row * row_bytes +
                                   (piece % kPanelPieces ^ row % 8) * 16;
      add(tile_lse, out);
      for (uint64_t left = slots; left != 0; left &= left - 1) {
        const int slot = __ffsll(static_cast<long long>(left)) - 1;
        add(lses[slot * args.group], partials + slot * slot_bytes);
      }
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      uint4 words;
      words.x = narrow_pair(Element{}, sums[0] * inverse, sums[1] * inverse);
      words.y = narrow_pair(Element{}, sums[2] * inverse, sums[3] * inverse);
      words.z = narrow_pair(Element{}, sums[4] * inverse, sums[5] * inverse);
      words.w = narrow_pair(Element{}, sums[6] * inverse, sums[7] * inverse);
      *reinterpret_cast<uint4*>(out) = words;
      if (args.lse != nullptr && piece == 0) {
        args.lse[head * args.lse_stride_head + token * args.lse_stride_token] = (offset + log2f(sum)) * kLogOfTwo;
      }
    }
  }
}

}  // namespace openmsa::cuda::sm90::attend
