// An item of the plan, in 32 bits.
#pragma once

#include <cstdint>

#include "cuda/sm90/plan/config.h"

namespace openmsa::cuda::sm90 {

struct PlanItem {
  uint32_t slot, head, token;
  uint32_t limit;  // keys of the block that the query sees, 1 to the block's size
};

__device__ inline uint32_t pack_item(const PlanItem& item) {
  constexpr int kToken = kItemSlotBits + kItemHeadBits;
  return item.slot | item.head << kItemSlotBits | item.token << kToken | (item.limit - 1) << (kToken + kItemTokenBits);
}

__device__ inline PlanItem unpack_item(uint32_t bits) {
  constexpr int kToken = kItemSlotBits + kItemHeadBits;
  return {bits & ((1u << kItemSlotBits) - 1), bits >> kItemSlotBits & ((1u << kItemHeadBits) - 1),
          bits >> kToken & ((1u << kItemTokenBits) - 1), (bits >> (kToken + kItemTokenBits)) + 1};
}

}  // namespace openmsa::cuda::sm90
