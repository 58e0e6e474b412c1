// Warpgroup products of staged rows, and the sums that come out.
#pragma once

#include <cstdint>

#include "cuda/common/elements.cuh"
#include "cuda/common/instructions/wgmma.cuh"
#include "cuda/common/staged_rows.h"

namespace openmsa::cuda {

// Issues sums = rows [first_row, first_row + 64) of a times every row of b.
template <typename Element, int kColumns, int kRowsA, int kRowsB>
__device__ inline void issue_product(float (&sums)[kRowsB / 2], const StagedRows<kColumns, kRowsA>& a, int first_row,
                                     const StagedRows<kColumns, kRowsB>& b) {
  // A descriptor counts addresses in 16 bytes; one instruction takes 32 bytes of k.
  constexpr int kStep = 32 / 16, kPanelA = kRowsA * kPanelRowBytes / 16, kPanelB = kRowsB * kPanelRowBytes / 16;
  const uint64_t start_a = wgmma_descriptor(a.panels[0][first_row]), start_b = wgmma_descriptor(b.panels);
#pragma unroll
  for (int panel = 0; panel < kColumns / kPanelColumns; ++panel) {
#pragma unroll
    for (int step = 0; step < kPanelRowBytes / 16; step += kStep) {
      wgmma_product(Element{}, sums, start_a + panel * kPanelA + step, start_b + panel * kPanelB + step,
                    panel + step > 0);
    }
  }
  wgmma_commit();
}

// Issues sums += a times the rows of b, 16 to a step. `a` as wgmma_product takes it from registers.
template <typename Element, int kColumns, int kRows>
__device__ inline void issue_transposed_product(float (&sums)[kColumns / 2], const uint32_t (&a)[kRows / 16][4],
                                                const StagedRows<kColumns, kRows>& b) {
  constexpr int kStep = 16 * kPanelRowBytes / 16;
  const uint64_t start = wgmma_descriptor_transposed(b.panels, kRows * kPanelRowBytes);
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    wgmma_product_transposed(Element{}, sums, a[step], start + step * kStep);
  }
  wgmma_commit();
}

// Where a thread's sums lie in the product (wgmma.cuh): sum i belongs to the thread's row i / 2 % 2.
__device__ inline int column_of(int i, int lane) { return 8 * (i / 4) + 2 * (lane % 4) + i % 2; }

// The four lanes of a row hold its words in turn: word i of lane l is the pair of columns 2 (4 i + l). Gives words 4 l
// to 4 l + 3 of them: 16 bytes that lie together.
__device__ inline uint4 gather_words(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (lane & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      const uint32_t other = __shfl_xor_sync(~0u, upper ? words[i] : words[i + distance], distance);
      (upper ? words[i] : words[i + distance]) = other;
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// The largest of the thread's row `half`; NaN counts for nothing.
template <int kSums>
__device__ inline float row_max(const float (&sums)[kSums], int half) {
  float even = fmaxf(sums[2 * half], sums[2 * half + 4]), odd = fmaxf(sums[2 * half + 1], sums[2 * half + 5]);
#pragma unroll
  for (int i = 2; i < kSums / 4; ++i) {
    even = fmaxf(even, sums[4 * i + 2 * half]);
    odd = fmaxf(odd, sums[4 * i + 2 * half + 1]);
  }
  return fmaxf(fmaxf(even, odd), -INFINITY);  // NaN where all are
}

// The same of both rows, side by side.
template <int kSums>
__device__ inline void row_maxima(const float (&sums)[kSums], float (&largest)[2]) {
  float maxima[4] = {sums[0], sums[1], sums[2], sums[3]};
#pragma unroll
  for (int i = 4; i < kSums; ++i) maxima[i % 4] = fmaxf(maxima[i % 4], sums[i]);
  largest[0] = fmaxf(fmaxf(maxima[0], maxima[1]), -INFINITY);
  largest[1] = fmaxf(fmaxf(maxima[2], maxima[3]), -INFINITY);
}

}  // namespace openmsa::cuda
