// Combine: each thread sums eight columns of a row over the parts, in their order.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/sm90/combine/config.h"

namespace openmsa::cuda::sm90::combine {

// The log-sum-exp of the parts' lses: -inf without any mass, NaN with a NaN, +inf with a +inf.
__device__ inline float merged_lse(const Arguments& args, const float* lses) {
  float largest = -INFINITY;
  bool is_nan = false;
  for (int32_t split = 0; split < args.splits; ++split) {
    const float lse = lses[split * args.lses_stride_split];
    is_nan |= lse != lse;
    largest = fmaxf(largest, lse);
  }
  if (is_nan) return NAN;
  if (fabsf(largest) == INFINITY) return largest;
  float sum = 0;
  for (int32_t split = 0; split < args.splits; ++split) sum += expf(lses[split * args.lses_stride_split] - largest);
  return largest + logf(sum);
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Arguments args) {
  static_assert(kVector<Element> == kVectorElements);
  const int64_t count = args.tokens * args.heads * args.pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t piece = i % args.pieces, head = i / args.pieces % args.heads, token = i / args.pieces / args.heads;
    const float* const lses = args.lses + head * args.lses_stride_head + token * args.lses_stride_token;
    const float lse = merged_lse(args, lses);
    const Element* const parts = static_cast<const Element*>(args.outs) + token * args.outs_stride_token +
                                 head * args.outs_stride_head + piece * kVectorElements;
    float sums[kVectorElements] = {};
    for (int32_t split = 0; split < args.splits; ++split) {
      // Without any mass there is nothing to share out.
      const float weight = lse == -INFINITY ? 0.0f : expf(lses[split * args.lses_stride_split] - lse);
      if (weight == 0.0f) continue;  // a part without mass has no say, whatever it holds
      float part[kVectorElements];
      load_widened(parts + split * args.outs_stride_split, part);
#pragma unroll
      for (int e = 0; e < kVectorElements; ++e) sums[e] = fmaf(weight, part[e], sums[e]);
    }
    uint4 words;
    words.x = narrow_pair(Element{}, sums[0], sums[1]);
    words.y = narrow_pair(Element{}, sums[2], sums[3]);
    words.z = narrow_pair(Element{}, sums[4], sums[5]);
    words.w = narrow_pair(Element{}, sums[6], sums[7]);
    *reinterpret_cast<uint4*>(static_cast<Element*>(args.out) + token * args.out_stride_token +
                              head * args.out_stride_head + piece * kVectorElements) = words;
    if (piece == 0) args.lse[head * args.lse_stride_head + token * args.lse_stride_token] = lse;
  }
}

}  // namespace openmsa::cuda::sm90::combine
