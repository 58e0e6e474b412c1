// Emulates src/cuda/common/instructions/load_global.cuh.
#pragma once

#include <cstdint>

namespace openmsa::cuda {

inline uint4 load_global_read_only(const void* address) { return *static_cast<const uint4*>(address); }

}  // namespace openmsa::cuda
