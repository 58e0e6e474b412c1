// A turn that groups of threads take one after another: a word of shared memory, 0 while nobody has it. It orders what
// they issue and guards no memory.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

// By one thread. PTX ISA, "Parallel Synchronization and Communication Instructions: atom".
__device__ inline void take_turn(uint32_t* turn) {
  uint32_t before;
  do {
    asm volatile("atom.relaxed.cta.shared::cta.cas.b32 %0, [%1], 0, 1;"
                 : "=r"(before)
                 : "r"(shared_address(turn))
                 : "memory");
  } while (before != 0);
}

// By all, of whom one `gives`: predicated, for a branch would end a product in flight.
__device__ inline void give_turn(uint32_t* turn, bool gives) {
  asm volatile(
      "{\n"
      ".reg .pred gives;\n"
      "setp.ne.b32 gives, %1, 0;\n"
      "@gives st.relaxed.cta.shared::cta.b32 [%0], 0;\n"
      "}\n" ::"r"(shared_address(turn)),
      "r"(static_cast<uint32_t>(gives))
      : "memory");
}

}  // namespace openmsa::cuda
