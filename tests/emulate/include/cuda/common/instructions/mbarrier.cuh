// Emulates src/cuda/common/instructions/mbarrier.cuh.
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

void barrier_init(uint64_t* barrier, int arrivals);
inline void fence_barrier_init() {}
void barrier_arrive(uint64_t* barrier);
void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes);
void barrier_wait(uint64_t* barrier, uint32_t parity);

}  // namespace openmsa::cuda
