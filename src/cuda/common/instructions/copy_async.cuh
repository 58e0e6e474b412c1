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

// cp.async.commit_group: the copies issued since the last call form a group.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: all but this thread's latest kPending groups are done.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace openmsa::cuda
