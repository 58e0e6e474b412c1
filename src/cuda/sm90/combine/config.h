// Combine: attentions of the same queries over disjoint keys become one.
#pragma once

#include <cstdint>

namespace openmsa::cuda::sm90::combine {

inline constexpr int kThreads = 256;
inline constexpr int kVectorElements = 8;  // of 16 bits, by each thread

struct Arguments {
  int32_t splits, heads;
  int32_t pieces;  // of a row: Dv / kVectorElements
  int64_t tokens;
  const void* outs;  // [S, Tq, Hq, Dv]
  int64_t outs_stride_split, outs_stride_token, outs_stride_head;
  const float* lses;  // [S, Hq, Tq]
  int64_t lses_stride_split, lses_stride_head, lses_stride_token;
  void* out;  // [Tq, Hq, Dv]
  int64_t out_stride_token, out_stride_head;
  float* lse;  // [Hq, Tq]
  int64_t lse_stride_head, lse_stride_token;
};

}  // namespace openmsa::cuda::sm90::combine
