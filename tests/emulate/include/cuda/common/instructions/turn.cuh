// Emulates src/cuda/common/instructions/turn.cuh.
#pragma once

#include <cstdint>

#include "emulate/device.h"

namespace openmsa::cuda {

inline void take_turn(uint32_t* turn) {
  while (*turn != 0) emulate::give_way();
  *turn = 1;
}
inline void give_turn(uint32_t* turn, bool gives) {
  if (gives) *turn = 0;
}

}  // namespace openmsa::cuda
