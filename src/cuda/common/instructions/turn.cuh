// A turn that one thread of a thread block holds at a time, by a word in shared memory, 0 while nobody has it.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

// PTX ISA, "Parallel Synchronization and Communication Instructions: atom" (acquire). Waits until it has the turn.
__device__ inline void take_turn(uint32_t* word) {
  asm volatile(
      "{\n"
      ".reg .pred taken;\n"
      ".reg .b32 before;\n"
      "waiting:\n"
      "atom.acquire.cta.shared::cta.cas.b32 before, [%0], 0, 1;\n"
      "setp.ne.b32 taken, before, 0;\n"
      "@taken bra waiting;\n"
      "}" ::"r"(shared_address(word))
      : "memory");
}

// "Data Movement and Conversion Instructions: st" (release), by the thread that has the turn. A thread with `mine`
// false does nothing: no branch, which would end a product in flight.
__device__ inline void give_turn(uint32_t* word, bool mine) {
  asm volatile(
      "{\n"
      ".reg .pred mine;\n"
      "setp.ne.b32 mine, %1, 0;\n"
      "@mine st.release.cta.shared::cta.b32 [%0], 0;\n"
      "}" ::"r"(shared_address(word)),
      "r"(static_cast<int>(mine))
      : "memory");
}

}  // namespace openmsa::cuda
