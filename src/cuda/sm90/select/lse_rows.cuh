// What the index_lse kernels share: rows on their way to shared memory, products, sums of exponentials.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions/copy_async.cuh"
#include "cuda/common/instructions/exp2.cuh"
#include "cuda/common/instructions/mbarrier.cuh"
#include "cuda/common/product_rows.cuh"
#include "cuda/sm90/select/lse_config.h"

namespace openmsa::cuda::sm90::lse {

// What the tensor cores multiply.
template <typename Element>
struct ProductType {
  using Type = Element;
};
template <>
struct ProductType<Float8E4m3> {
  using Type = Float16;
};

// Copies 16 bytes of a row, elements from `piece` * kVector on, to where a product reads them; zeros unless `present`.
template <typename Element, int kHeadDim, int kRows>
__device__ inline void stage_piece(StagedRows<kHeadDim, kRows>* to, int row, int piece, const Element* from,
                                   bool present) {
  constexpr int kPanelPieces = kPanelRowBytes / 16;
  const auto place = [&](int staged_piece) {
    return &to->panels[staged_piece / kPanelPieces][row][(staged_piece % kPanelPieces ^ row % 8) * 16];
  };
  if constexpr (sizeof(Element) == 2) {
    copy_async(place(piece), from, present);
  } else {
    const uint4 words = present ? load_global_read_only(from) : uint4{};
    const auto widen = [](uint32_t low, uint32_t high) {
      return make_uint4(convert_e4m3x2_to_f16x2(static_cast<uint16_t>(low)),
                        convert_e4m3x2_to_f16x2(static_cast<uint16_t>(low >> 16)),
                        convert_e4m3x2_to_f16x2(static_cast<uint16_t>(high)),
                        convert_e4m3x2_to_f16x2(static_cast<uint16_t>(high >> 16)));
    };
    *reinterpret_cast<uint4*>(place(2 * piece)) = widen(words.x, words.y);
    *reinterpret_cast<uint4*>(place(2 * piece + 1)) = widen(words.z, words.w);
  }
}

// A thread's arrivals at a barrier for what it staged: one when its copies have come, one for what it stored itself.
// The consumers fence between generic accesses and products: a fence here would wait for the copies.
inline constexpr int kStagedArrivals = 2;
__device__ inline void arrive_when_staged(uint64_t* barrier) {
  copy_async_arrive(barrier);
  barrier_arrive(barrier);
}

// The rows that thread number `thread` of kThreads stages, a piece of each: staged_row(.., i) for i below kStagedRows.
template <typename Element, int kThreads, int kHeadDim, int kRows>
inline constexpr int kStagedRows = kRows / (kThreads / (kHeadDim / kVector<Element>));

template <typename Element, int kThreads, int kHeadDim>
__device__ inline int staged_row(int thread, int i) {
  constexpr int kPieces = kHeadDim / kVector<Element>;
  static_assert(kThreads % kPieces == 0);
  return thread / kPieces + i * (kThreads / kPieces);
}

template <typename Element, int kHeadDim>
__device__ inline int staged_piece(int thread) {
  return thread % (kHeadDim / kVector<Element>);
}

template <int kSums>
__device__ inline void scale_in_double(float (&sums)[kSums], double scale) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = static_cast<float>(scale * static_cast<double>(sums[i]));
}

// ---- Sums of 2^(factor * (score - max)). A NaN score makes its sum NaN, one of +inf makes it +inf. ----

// max * factor, or 0 for maxima that are infinite: exponents count from it.
__device__ inline float offset_of(float max, float factor) {
  const float offset = max * factor;
  return fabsf(offset) < INFINITY ? offset : 0.0f;
}

// A sum relative to a larger maximum. An empty sum stays empty wherever its maximum lies; an infinite one is nothing
// beside the larger maximum's.
__device__ inline float rebase(float sum, float max, float to, float factor) {
  if (sum == 0.0f || max == to) return sum;
  return (sum == INFINITY ? FLT_MAX : sum) * exp2_approximate((max - to) * factor);
}

// The natural logarithm of a sum.
__device__ inline float natural_log(float offset, float sum) {
  constexpr float kLogOfTwo = 0.693147180559945309f;
  return (offset + log2f(sum)) * kLogOfTwo;
}

// The sum over the thread's row `half`, whose largest score is `max`. Changes the scores.
template <int kSums>
__device__ inline float row_sum(float (&sums)[kSums], int half, float max, float factor) {
  float offset = offset_of(max, factor);
  // One fused operation gives score * factor - offset. Its product is exact and the offset rounded; for huge scores the
  // difference between the two exceeds every exponent, so those are subtracted first.
  constexpr float kHuge = 0x1p20f;
  if (__any_sync(~0u, fabsf(offset) > kHuge)) {
    const float start = fabsf(max) < INFINITY ? max : 0.0f;
    offset = 0.0f;
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) sums[4 * i + 2 * half + e] -= start;
    }
  }
  constexpr int kChains = 4;
  float total[kChains] = {};
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      total[(2 * i + e) % kChains] += exp2_approximate(fmaf(sums[4 * i + 2 * half + e], factor, -offset));
    }
  }
  return (total[0] + total[1]) + (total[2] + total[3]);
}

}  // namespace openmsa::cuda::sm90::lse
