// The running softmax of a thread's two rows of a product.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/common/instructions/exp2.cuh"
#include "cuda/common/product_rows.cuh"

namespace openmsa::cuda::sm90::attend {

// A score counts in units of log 2: score * factor. Weights are 2^(score * factor - offset).
struct SoftmaxRow {
  // Near the largest such score so far: a new one moves the offset only when it lies more than kSlack above, so that
  // few blocks rescale what was summed up before. Weights stay below 2^kSlack, which every element type holds. 0 while
  // the largest score is +inf: the sum is then +inf, with a NaN it is NaN. Before the first score, nothing is left of
  // whatever is rescaled.
  float offset = -FLT_MAX;
  float ceiling = -INFINITY;  // above it, a score moves the offset
  float sum = 0;
};
inline constexpr float kSlack = 8;

// A row's part in the block at hand: whether it takes part, and the keys that it sees.
struct RowPart {
  bool member;
  int32_t limit;
};

// Keys from each row's limit on become -inf. Where the row takes no part all scores become 0: some are of memory that
// nobody sees, and 0 times a score is to be 0.
template <int kSums>
__device__ inline void hide_columns(float (&scores)[kSums], const RowPart (&parts)[2], int lane) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const RowPart& part = parts[i / 2 % 2];
    if (!part.member) {
      scores[i] = 0.0f;
    } else if (column_of(i, lane) >= part.limit) {
      scores[i] = -INFINITY;
    }
  }
}

// The product of a score and the factor is exact in the fused operation below, the offset rounded. Beyond this the
// rounding nears the exponents themselves, and float64 has to form them.
inline constexpr float kHugeOffset = 0x1p20f;

// Turns the scores of a block into weights in place, 0 in rows that take no part, and adds them to their rows' sums.
// `rescale` is the factor of what the rows summed up before. No branch surrounds the exponentials: the product in
// flight beside them would have to end first. Infinite or NaN scores make NaN of a row that takes no part, but not of
// its sum; `is_whole` says that a member sees each key, so that they are the caller's. Offsets that are huge are the
// caller's matter without kInFloat64.
template <bool kInFloat64, int kSums>
__device__ inline void add_scores(float (&scores)[kSums], const RowPart (&parts)[2], bool is_whole, float factor,
                                  int lane, SoftmaxRow (&rows)[2], float (&rescale)[2]) {
  constexpr int kBlock = kSums * 2;
  if (__builtin_expect(__any_sync(~0u, !is_whole || min(parts[0].limit, parts[1].limit) < kBlock), false)) {
    hide_columns(scores, parts, lane);
  }
  float largest[2], slope[2], shift[2];
  row_maxima(scores, largest);
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const float others[2] = {__shfl_xor_sync(~0u, largest[0], distance), __shfl_xor_sync(~0u, largest[1], distance)};
    largest[0] = fmaxf(largest[0], others[0]);
    largest[1] = fmaxf(largest[1], others[1]);
  }
  bool huge = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    SoftmaxRow& row = rows[half];
    const bool member = parts[half].member;
    const float scaled = largest[half] * factor;
    const bool rises = member && scaled > row.ceiling;
    const float offset = scaled < INFINITY ? scaled : 0.0f;
    rescale[half] = rises ? exp2_approximate(row.offset - offset) : 1.0f;
    row.offset = rises ? offset : row.offset;
    row.ceiling = rises ? scaled + kSlack : row.ceiling;
    slope[half] = member ? factor : 0.0f;
    shift[half] = member ? -row.offset : -INFINITY;
    huge |= member && fabsf(row.offset) > kHugeOffset;
  }
  if (kInFloat64 && __builtin_expect(__any_sync(~0u, huge), false)) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      scores[i] = static_cast<float>(static_cast<double>(scores[i]) * factor - rows[i / 2 % 2].offset);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      slope[half] = parts[half].member ? 1.0f : 0.0f;
      shift[half] = parts[half].member ? 0.0f : -INFINITY;
    }
  }
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int half = i / 2 % 2;
    scores[i] = exp2_approximate(fmaf(scores[i], slope[half], shift[half]));
    sums[half] += scores[i];
  }
  wgmma_pin(sums);  // added up between the exponentials, and not behind them where a branch finds a member
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (parts[half].member) rows[half].sum = fmaf(rows[half].sum, rescale[half], sums[half]);
  }
}

}  // namespace openmsa::cuda::sm90::attend
