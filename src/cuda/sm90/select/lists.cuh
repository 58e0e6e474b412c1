// A row's running list in shared memory: its best blocks so far, best first, one thread per row.
#pragma once

#include <cstdint>

#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {

// Scores as numbers that order like the floats, all above 0, the empty slot. -0 counts as +0.
__device__ inline uint32_t ordered_score(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// A column of the lists in shared memory: the slots of one row, kTileRows apart, so that lanes with different rows
// never meet in a bank, whatever their slots. Filled slots stand in no order.
template <int kTileRows>
struct List {
  uint32_t* scores;
  int32_t* blocks;

  __device__ uint32_t& score(int slot) const { return scores[slot * kTileRows]; }
  __device__ int32_t& block(int slot) const { return blocks[slot * kTileRows]; }
  __device__ void set(int slot, uint32_t entry_score, int32_t entry_block) const {
    score(slot) = entry_score;
    block(slot) = entry_block;
  }
  // Orders entries: by score, equal scores by lower block. 0 is an empty slot.
  __device__ uint64_t order(int slot) const {
    const uint32_t s = score(slot);
    return s == 0 ? 0 : static_cast<uint64_t>(s) << 32 | ~static_cast<uint32_t>(block(slot));
  }
};

struct Worst {
  uint32_t score;
  int slot;
};

// The entry of slots [first, last), all filled, that leaves next: of the lowest score, of equal ones the youngest
// (blocks come in ascending order, so ties keep the lower block).
template <int kChunk, int kTileRows>
__device__ inline Worst find_worst(const List<kTileRows>& list, int first, int last) {
  Worst worst{UINT32_MAX, first};
  bool tie = false;
  for (int base = first; base < last; base += kChunk) {
    uint32_t scores[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) scores[i] = base + i < last ? list.score(base + i) : UINT32_MAX;
    uint32_t lowest = scores[0];
#pragma unroll
    for (int i = 1; i < kChunk; ++i) lowest = min(lowest, scores[i]);
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) equal |= scores[i] == lowest ? 1u << i : 0;
    if (lowest <= worst.score) {
      tie = lowest == worst.score || (equal & (equal - 1)) != 0;
      worst = {lowest, base + __ffs(static_cast<int>(equal)) - 1};
    }
  }
  if (tie) {
    for (int slot = first; slot < last; ++slot) {
      if (list.score(slot) == worst.score && list.block(slot) > list.block(worst.slot)) worst.slot = slot;
    }
  }
  return worst;
}

}  // namespace openmsa::cuda::sm90
