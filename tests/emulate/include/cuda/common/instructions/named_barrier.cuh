// Emulates src/cuda/common/instructions/named_barrier.cuh.
#pragma once

#include "emulate/device.h"

namespace openmsa::cuda {

inline void named_barrier_sync(int id, int threads) { emulate::sync_named(id, threads); }
inline void named_barrier_arrive(int id, int threads) { emulate::arrive_named(id, threads); }

}  // namespace openmsa::cuda
