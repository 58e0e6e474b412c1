// Emulates src/cuda/common/instructions/register_limit.cuh: counts the pool.
#pragma once

#include "emulate/device.h"

namespace openmsa::cuda {

template <int kCount>
void raise_register_limit() {
  emulate::set_register_limit(kCount, true);
}
template <int kCount>
void lower_register_limit() {
  emulate::set_register_limit(kCount, false);
}

}  // namespace openmsa::cuda
