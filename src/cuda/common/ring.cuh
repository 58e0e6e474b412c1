// A position in a ring of shared slots that a full and an empty barrier guard.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/mbarrier.cuh"

namespace openmsa::cuda {

template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
  __device__ void wait_full(uint64_t (&full)[kSlots]) const { barrier_wait(&full[slot], phase); }
  // The first round finds every slot empty.
  __device__ void wait_empty(uint64_t (&empty)[kSlots]) const { barrier_wait(&empty[slot], phase ^ 1); }
};

}  // namespace openmsa::cuda
