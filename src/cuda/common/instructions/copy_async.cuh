// Asynchronous copies of 16 bytes by each thread: PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy".
#pragma once

#include <cstdint>

#include "cuda/common/instructions/shared_address.cuh"

namespace openmsa::cuda {

// cp.async: 16 bytes from global to shared memory, through L2 only. Zeros, and nothing is read, unless `present`.
__device__ inline void copy_async(void* shared, const void* global, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(present ? 16 : 0)
               : "memory");
}

// cp.async.wait_all: the copies that this thread issued are done.
__device__ inline void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// cp.async.mbarrier.arrive.noinc: this thread arrives at the barrier once its copies so far are done. The arrival is
// one of those that the barrier was initialised with.
__device__ inline void copy_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

}  // namespace openmsa::cuda
