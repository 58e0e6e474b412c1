// Emulates src/cuda/common/instructions/turn.cuh.
#pragma once

#include <cstdint>

#include "emulate/device.h"

namespace openmsa::cuda {

inline void take_turn(uint32_t* word) {
  while (*word != 0) emulate::give_way();
  *word = 1;
}
inline void give_turn(uint32_t* word, bool mine) {
  if (mine) *word = 0;
}

}  // namespace openmsa::cuda
