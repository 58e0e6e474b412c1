// Lists of a split tile on their way to the merge. An entry is one number that orders as its list does: forced entries
// (init blocks) first, then by score, equal scores by lower block. 0 is no entry.
#pragma once

#include <cstdint>

#include "cuda/sm90/select/config.h"

namespace openmsa::cuda::sm90 {

inline constexpr PartialEntry kForcedEntry = PartialEntry{1} << 63;
inline constexpr int32_t kBlockMask = 0x7fffffff;

__device__ inline PartialEntry partial_entry(bool forced, uint32_t score, int32_t block) {
  return (forced ? kForcedEntry : 0) | (static_cast<PartialEntry>(score) << 31) |
         static_cast<PartialEntry>(kBlockMask - block);
}

__device__ inline int32_t partial_block(PartialEntry entry) {
  return kBlockMask - static_cast<int32_t>(entry & kBlockMask);
}

}  // namespace openmsa::cuda::sm90
