// Emulates src/cuda/common/instructions/shared_address.cuh.
#pragma once

#include <cstdint>

#include "emulate/device.h"

namespace openmsa::cuda {

inline uint32_t shared_address(const void* pointer) { return emulate::shared_address(pointer); }

}  // namespace openmsa::cuda
